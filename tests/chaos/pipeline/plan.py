"""Pure: the plan of a run of the harness, from its seed: the kind of pipeline of each round, and its faults in order.

The run determines when a fault is injected: each waits until the one before it is overcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

FAULTS_PER_ROUND = 25

KILLS = ("kill_learner", "kill_worker", "kill_server", "kill_supervisor")
PAUSES = ("pause_learner", "pause_worker", "pause_server")
NETWORK = ("reset_network", "cut_network", "slow_network", "torn_network")
OTHERS = ("full_disk", "port_scan", "damaged_checkpoint")
EMBEDDED_ONLY = ("kill_keeper",)
OUTSIDE_ONLY = (*NETWORK, "empty_server", "set_back_clock")

FEW = (
    *("reset_network", "port_scan", "kill_server", "pause_worker"),
    *("cut_network", "full_disk", "kill_worker", "kill_learner"),
)
"""Eight faults that take a minute together, in a run of one rank with an outside server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    ranks: int
    outside: bool
    """Whether its Redis is an outside server behind a proxy."""

    @property
    def name(self) -> str:
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}, {'outside' if self.outside else 'embedded'} server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    seed: int
    round: int
    pipeline: Pipeline
    faults: Sequence[str]
    warm: bool = False
    """Whether its processes are forks of one that has imported what they need."""

    def random(self) -> Random:
        """Return the random numbers of the faults."""
        return Random(f"faults {self.seed}/{self.round}")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


PIPELINES = tuple(Pipeline(ranks=ranks, outside=outside) for ranks in (1, 2) for outside in (True, False))


def rounds(seed: int, faults: int) -> list[Plan]:
    """Return the rounds, with every kind of pipeline in turn and `faults` faults in all."""
    plans: list[Plan] = []
    for number, start in enumerate(range(0, faults, FAULTS_PER_ROUND)):
        pipeline = PIPELINES[(seed + number) % len(PIPELINES)]
        count = min(FAULTS_PER_ROUND, faults - start)
        plans.append(Plan(seed=seed, round=number, pipeline=pipeline, faults=_faults(seed, number, pipeline, count)))
    return plans


def few(seed: int) -> list[Plan]:
    return [Plan(seed=seed, round=0, pipeline=Pipeline(ranks=1, outside=True), faults=FEW, warm=True)]


def _faults(seed: int, number: int, pipeline: Pipeline, count: int) -> tuple[str, ...]:
    """Yield all faults that this pipeline can have, shuffled, again and again."""
    kinds = [*KILLS, *PAUSES, *OTHERS, *(OUTSIDE_ONLY if pipeline.outside else EMBEDDED_ONLY)]
    random, chosen = Random(f"plan {seed}/{number}"), list[str]()
    while len(chosen) < count:
        random.shuffle(kinds)
        chosen += kinds
    return tuple(chosen[:count])
