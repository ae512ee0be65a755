"""`async-rl launch ray`: places the processes of a run on a Ray cluster, supervises them, and changes their number on request.

async-rl launch ray ── supervises ──▶ gangs: learner (a member per machine), worker 0 … n, evaluator, buffer
        ▲                             member = an actor that starts one of the commands of `async-rl run`
        └── desk ◀── async-rl fleet scale, drain, stop, ls
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import structlog

from async_rl.config import Config
from async_rl.config.loading import to_yaml
from async_rl.config.pretrained import left_to_fetch
from async_rl.errors import ConfigError
from async_rl.launch import fleet_plan as plan
from async_rl.launch.learner_nodes import LearnerNodes, learner_sizes
from async_rl.launch.ray.cluster import Actor, Cluster
from async_rl.launch.ray.desk import Desk, DrainOne, FleetRequest, ProcessRow, Scale, StopAll, desk_name
from async_rl.launch.ray.gang import WAITING, FleetSettings, Gang, starts
from async_rl.launch.run_supervisor import RunSupervisor, Start
from async_rl.supervision import drain_on_signals

log = structlog.get_logger("async_rl.fleet")

SECRETS = ("ASYNC_RL_REDIS_PASSWORD", "HF_TOKEN", "WANDB_API_KEY")
"""Environment variables of the launching process that all processes of the fleet get."""

LOOK_S = 2.0
"""Seconds between two looks at the cluster: it tells of preempted machines, and of waiting processes, only when asked."""

TOLD_AFTER_S = 10.0
"""Seconds until a process that waits for a machine is told."""


def check(config: Config, cluster: Cluster) -> None:
    """Refuse a configuration whose processes would not find each other. Raises ConfigError."""
    machines = cluster.addresses()
    if len(machines) == 1:
        return
    if not config.redis.url:
        raise ConfigError(
            f"redis.url is empty, but the Ray cluster has {len(machines)} machines: name a server that all of them reach "
            "(docs/redis.md)"
        )
    if not config.wire.insecure:
        raise ConfigError(
            f"wire.insecure is false, but the Ray cluster has {len(machines)} machines: weights travel between them, and "
            "process groups do not authenticate their members; if the network is private, set wire.insecure: true"
        )


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
        machines = cluster.addresses()
        self._settings = FleetSettings(
            config_yaml=to_yaml(left_to_fetch(config).seen_from_anywhere()),
            secrets={name: inherited[name] for name in SECRETS if name in inherited},
            is_on_several_machines=len(machines) > 1,
            policy=config.supervision.policy,
            logs=config.run_folder / "logs",
        )
        self._has_gpus = config.device != "cpu" and cluster.has_gpus
        sizes = learner_sizes(config)
        self._learner_nodes = LearnerNodes(sizes=sizes, resize_s=config.launch.learner_resize_s, nodes=sizes[0])
        plans = [
            *([] if config.redis.url else [plan.buffer()]),
            plan.learner(config, has_gpus=self._has_gpus),
            *(plan.worker(config, index, has_gpus=self._has_gpus) for index in range(config.worker.processes)),
            *([plan.evaluator(config, has_gpus=self._has_gpus)] if config.evaluation.every else []),
        ]
        starting: dict[str, Start] = {each.name: starts(cluster, each, self._settings) for each in plans}
        self.supervisor = RunSupervisor(starting, config.run_folder, config.recording.events_bytes)

    @property
    def workers(self) -> list[str]:
        """Names of the workers, by index."""
        names = [name for name in self.supervisor.children if plan.worker_index(name) is not None]
        return sorted(names, key=lambda name: plan.worker_index(name) or 0)

    async def answer_requests(self, stop: asyncio.Event) -> None:
        request: FleetRequest | None
        while (request := await self._cluster.answer(self._desk.next_request.remote())) is not None:
            sentence = await self._do(request, stop)
            await self._cluster.answer(self._desk.answer.remote(sentence))

    async def watch_machines(self) -> None:
        """Move processes off machines that will be taken away; say which wait for a machine; resize the learner; tell the desk
        where all are."""
        waiting: dict[str, float] = {}
        while True:
            leaving = self._cluster.draining()
            gangs = {name: child for name, child in self.supervisor.children.items() if isinstance(child, Gang)}
            for name, gang in gangs.items():
                if any(place.machine in leaving for place in gang.places):
                    log.warning(f"{name} leaves {gang.where}, which the cluster will take away")
                    gang.move()
                waiting[name] = waiting.get(name, 0.0) + LOOK_S if gang.where == WAITING else 0.0
                if TOLD_AFTER_S <= waiting[name] < TOLD_AFTER_S + LOOK_S:
                    log.warning(f"{name} waits for a machine: none has {gang.needs} free")
            self._resize_learner(gangs["learner"])
            rows = [ProcessRow(name=name, where=gang.where) for name, gang in gangs.items()]
            await self._cluster.answer(self._desk.show.remote(rows))
            await asyncio.sleep(LOOK_S)

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
                if name not in self.workers:
                    return f"there is no worker {name!r}; there are {', '.join(self.workers) or 'none'}"
                await self.supervisor.remove(name)
                return f"{name} has drained"
            case Scale(workers=wanted):
                return await self._scale(wanted)

    async def _scale(self, wanted: int) -> str:
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
