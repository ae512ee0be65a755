"""Which processes a fleet on a cluster has, and what each needs of the machine that it is placed on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from async_rl.config import Config
from async_rl.config.run import Resources
from async_rl.launch.commands import SCHEDULED, Role
from async_rl.launch.local import CHECKPOINT_GRACE_S, DRAIN_GRACE_S
from async_rl.plan.learner_sizes import learner_sizes, ranks_per_machine
from async_rl.supervision.processes.ranks import RankRange


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPlan:
    """One process of a fleet, with its child processes."""

    name: str
    role: Role
    words: tuple[str, ...] = ()
    """Arguments before those that name the configuration."""
    ranks: RankRange | None = None
    """The learner's ranks that it starts."""
    resources: Mapping[str, float]
    has_log: bool = True
    """Whether its output goes to the run's folder, not to the terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangPlan:
    """Members that start and end together, each on a machine of its own."""

    name: str
    members: tuple[MemberPlan, ...]
    grace_s: float
    is_elastic: bool = False
    """Whether it may have fewer or more members."""


def learner(config: Config, *, has_gpus: bool, nodes: int | None = None) -> GangPlan:
    """The learner: a member for each of `nodes` machines (`launch.learner_nodes`). Raises ConfigError if they cannot share its
    ranks."""
    sizes, each = learner_sizes(config), ranks_per_machine(config)
    nodes = nodes if nodes is not None else sizes[0]
    resources = _needs(config.launch.learner_resources, gpus=each if has_gpus else 0)
    members = tuple(
        MemberPlan(
            name="learner" if node == 0 else f"learner-{node}",
            role="learner",
            ranks=RankRange(first=node * each, count=each, world=nodes * each),
            resources=resources,
            has_log=node > 0,
        )
        for node in range(nodes)
    )
    return GangPlan(name="learner", members=members, grace_s=CHECKPOINT_GRACE_S, is_elastic=len(sizes) > 1)


def worker(config: Config, index: int, *, has_gpus: bool) -> GangPlan:
    resources = _needs_of_engines(config, has_gpus=has_gpus)
    return _single(f"worker-{index}", "rollout_workers", resources, grace_s=config.worker.drain_s + DRAIN_GRACE_S)


def evaluator(config: Config, *, has_gpus: bool) -> GangPlan:
    """The process that evaluates live weights, which needs what a worker needs."""
    resources = _needs_of_engines(config, has_gpus=has_gpus)
    return _single("evaluator", "rollout_workers.evaluation", resources, (SCHEDULED,), grace_s=DRAIN_GRACE_S)


def buffer() -> GangPlan:
    """The embedded Redis server, for a fleet on one machine."""
    return _single("buffer", "buffer", {"CPU": 0}, ("serve",), grace_s=60.0)


def fleet(config: Config, *, has_gpus: bool) -> list[GangPlan]:
    """All gangs of a run, in the order in which they start."""
    return [
        *([] if config.redis.url else [buffer()]),
        learner(config, has_gpus=has_gpus),
        *(worker(config, index, has_gpus=has_gpus) for index in range(config.worker.processes)),
        *([evaluator(config, has_gpus=has_gpus)] if config.evaluation.every else []),
    ]


def cores(config: Config) -> int:
    """How many cores the processes of a run ask for, all together."""
    members = [member for gang in fleet(config, has_gpus=False) for member in gang.members]
    return math.ceil(sum(member.resources["CPU"] for member in members))


def worker_index(name: str) -> int | None:
    """The index of the worker of this name; None: it is no worker."""
    kind, _, index = name.partition("-")
    return int(index) if kind == "worker" and index.isdecimal() else None


def _single(name: str, role: Role, resources: Resources, words: tuple[str, ...] = (), *, grace_s: float) -> GangPlan:
    return GangPlan(name=name, members=(MemberPlan(name=name, role=role, words=words, resources=resources),), grace_s=grace_s)


def _needs_of_engines(config: Config, *, has_gpus: bool) -> Resources:
    gpus = config.worker.engines * config.worker.tensor if has_gpus else 0
    return _needs(config.launch.worker_resources, gpus=gpus)


def _needs(given: Resources, *, gpus: int) -> Resources:
    return {"CPU": 1, "GPU": gpus, **given}
