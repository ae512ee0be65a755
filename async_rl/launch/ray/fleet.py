"""`async-rl launch ray`: places the processes of a run on a Ray cluster, supervises them, and changes their number on request.

async-rl launch ray ── supervises ──▶ gangs: learner (a member per machine), worker 0 … n, evaluator, buffer
        ▲                             member = an actor that starts one of the commands of `async-rl run`
        └── desk ◀── async-rl fleet scale, drain, stop, ls
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress

import structlog

from async_rl.config import Config
from async_rl.config.loading import to_yaml
from async_rl.config.pretrained import left_to_fetch
from async_rl.errors import ConfigError
from async_rl.launch import fleet_plan as plan
from async_rl.launch.learner_nodes import LearnerNodes
from async_rl.launch.ray.cluster import Actor, ActorLost, Cluster
from async_rl.launch.ray.desk import Desk, DrainOne, FleetRequest, ProcessRow, Scale, StopAll, desk_name
from async_rl.launch.ray.gang import LOOK_S, FleetSettings, Gang, starts
from async_rl.launch.ray.reach import check
from async_rl.launch.run_supervisor import RunSupervisor, Start
from async_rl.plan.learner_sizes import learner_sizes
from async_rl.supervision import drain_on_signals

log = structlog.get_logger("async_rl.fleet")

SECRETS = ("ASYNC_RL_REDIS_PASSWORD", "ASYNC_RL_GATEWAY_TOKEN", "HF_TOKEN", "WANDB_API_KEY")
"""Environment variables of the launching process that all processes of the fleet get."""

DEFAULTS = ("HF_HOME", "GLOO_", "NCCL_")
"""Beginnings of the names of those that they get unless their machine has its own, such as another name of an interface."""

TOLD_AFTER_S = 10.0
"""Seconds until a process that waits for a machine is told."""


async def run(config: Config, inherited: Mapping[str, str], cluster: Cluster) -> int:
    """Run the fleet until its learner ends, and return the exit code, as `async-rl run` does."""
    stop = drain_on_signals()
    desk = cluster.named(Desk, desk_name(config.run.name))
    fleet = Fleet(config, inherited, cluster, desk)
    async with asyncio.TaskGroup() as tasks:
        helpers = [tasks.create_task(each) for each in (fleet.answer_requests(stop), fleet.watch_machines())]
        code = await fleet.supervisor.run(stop)
        for helper in helpers:
            helper.cancel()
    return code


class Fleet:
    """The gangs of a run, and what may be asked of them.

    waits for:    a request; a machine that is to be taken away
    unblocked by: `async-rl fleet`; a preemption notice
    """

    def __init__(self, config: Config, inherited: Mapping[str, str], cluster: Cluster, desk: Actor) -> None:
        self._config, self._cluster, self._desk = config, cluster, desk
        self._addresses = cluster.addresses()
        self._changes = asyncio.Lock()
        """Held while the number of workers changes."""
        self._settings = FleetSettings(
            config_yaml=to_yaml(left_to_fetch(config).seen_from_anywhere()),
            secrets={name: inherited[name] for name in SECRETS if name in inherited},
            defaults={name: value for name, value in inherited.items() if name.startswith(DEFAULTS)},
            policy=config.supervision.policy,
            logs=config.run_folder / "logs",
        )
        self._has_gpus = config.device == "cuda" or (config.device == "auto" and cluster.has_gpus)
        sizes = learner_sizes(config)
        self._learner_nodes = LearnerNodes(sizes=sizes, resize_s=config.launch.learner_resize_s, nodes=sizes[0])
        plans = plan.fleet(config, has_gpus=self._has_gpus)
        starting: dict[str, Start] = {each.name: starts(cluster, each, self._settings) for each in plans}
        self.supervisor = RunSupervisor(starting, config.run_folder, config.recording.events_bytes)

    @property
    def workers(self) -> list[str]:
        """Names of the workers that have not ended, by index."""
        names = [name for name in self.supervisor.children if plan.worker_index(name) is not None]
        return sorted(names, key=lambda name: plan.worker_index(name) or 0)

    async def answer_requests(self, stop: asyncio.Event) -> None:
        """Do what is asked, at the same time, but one change of the workers after the other."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    number, request = await self._cluster.answer(self._desk.next_request.remote())
                except ActorLost as error:
                    log.warning(f"`async-rl fleet` no longer reaches this fleet: {error}")
                    return
                tasks.create_task(self._answer(number, request, stop))

    async def _answer(self, number: int, request: FleetRequest, stop: asyncio.Event) -> None:
        sentence = await self._do(request, stop)
        with suppress(ActorLost):
            await self._cluster.answer(self._desk.answer.remote(number, sentence))

    async def watch_machines(self) -> None:
        """Move processes off machines that will be taken away; say which wait for a machine, and what machines that join lack;
        resize the learner; tell the desk where all are."""
        waiting: dict[str, float] = {}
        while True:
            leaving = self._cluster.draining()
            gangs = {name: child for name, child in self.supervisor.children.items() if isinstance(child, Gang)}
            for name, gang in gangs.items():
                if any(place.machine in leaving for place in gang.places) and gang.move():
                    log.warning(f"{name} leaves {gang.where}, which the cluster will take away")
                waiting[name] = waiting.get(name, 0.0) + LOOK_S if gang.is_waiting else 0.0
                if TOLD_AFTER_S <= waiting[name] < TOLD_AFTER_S + LOOK_S:
                    log.warning(f"{name} waits for a machine{gang.needs}, or starts slowly on one")
            self._check_new_machines()
            if (learner := gangs.get("learner")) is not None:
                self._resize_learner(learner)
            rows = [ProcessRow(name=name, where=self._where(gang)) for name, gang in gangs.items()]
            with suppress(ActorLost):
                await self._cluster.answer(self._desk.show.remote(rows))
            await asyncio.sleep(LOOK_S)

    def _where(self, gang: Gang) -> str:
        failed = self.supervisor.left_out.get(gang.spec.name)
        return f"left out: {failed}" if failed is not None else gang.where

    def _check_new_machines(self) -> None:
        """Say what processes lack on machines that have joined since the fleet was started."""
        addresses = self._cluster.addresses()
        new, self._addresses = sorted(addresses - self._addresses), self._addresses | addresses
        if new:
            try:
                check(self._config, addresses)
            except ConfigError as error:
                where = ", ".join(new)
                log.warning(
                    f"{where} joined the cluster, and what is placed there will fail: {error}, then launch the run again"
                )

    def _resize_learner(self, learner: Gang) -> None:
        """Let an elastic learner go on without machines that it has waited for, or take those that are free."""
        before = self._learner_nodes
        if len(before.sizes) == 1:
            return
        machines = learner.num_machines
        self._learner_nodes = before.after(machines, time.monotonic())
        if (nodes := self._learner_nodes.nodes) != before.nodes:
            seen = f"for {before.resize_s:g} s it has had room on {machines}"
            log.warning(f"learner resumes on {nodes} of {before.sizes[0]} machines instead of {before.nodes}: {seen}")
            learner.resize(plan.learner(self._config, has_gpus=self._has_gpus, nodes=nodes))

    async def _do(self, request: FleetRequest, stop: asyncio.Event) -> str:
        match request:
            case StopAll():
                stop.set()
                return "the fleet drains"
            case DrainOne(name=name):
                async with self._changes:
                    if name not in self.workers:
                        return f"there is no worker {name!r}; there are {', '.join(self.workers) or 'none'}"
                    await self.supervisor.remove(name)
                return f"{name} has drained"
            case Scale(workers=wanted):
                async with self._changes:
                    return await self._scale(wanted)

    async def _scale(self, wanted: int) -> str:
        """Have this many workers. Those that were left out for good do not count, and make room for others."""
        left_out = self.supervisor.left_out
        for name in [name for name in self.workers if name in left_out and not left_out[name].is_tried_again]:
            await self.supervisor.remove(name)
        before = self.workers
        indices = {plan.worker_index(name) for name in before}
        free = (index for index in range(wanted + len(before)) if index not in indices)
        for _ in range(wanted - len(before)):
            new = plan.worker(self._config, next(free), has_gpus=self._has_gpus)
            self.supervisor.add(new.name, starts(self._cluster, new, self._settings))
        async with asyncio.TaskGroup() as tasks:
            for name in before[wanted:]:
                tasks.create_task(self.supervisor.remove(name))
        return f"{len(self.workers)} workers, {len(before)} before"
