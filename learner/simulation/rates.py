"""What a simulation needs to know of a run beside its configuration, and the world that follows from both."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from statistics import fmean

from async_rl.config import BatchConfig, Config
from async_rl.errors import ConfigError
from learner.pace.controller import LOWEST
from learner.simulation.control_traffic import LEARNER_PUSH_S
from learner.simulation.world import SimulatedWorld, some_vary
from learner.versions.push_policy import PushPolicy

DRAWN = 1000
"""Waits of groups that stand for their distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Times in seconds. Those of groups are means; a group's time in an engine is `alone_s` + `group_s` x the groups in it."""

    learner_s: float
    """The learner's time for a step."""
    group_s: float
    learner_varies: float = 0.08
    """Standard deviation of the logarithm of `learner_s`."""
    alone_s: float = 0.0
    sizes: tuple[float, ...] = ()
    """Sizes of groups relative to their mean, to draw from. Empty: lognormal with a deviation of 0.3."""
    latencies: tuple[float, ...] = (0.0,)
    """Times that groups waited for tools and rewards, to draw from."""
    playing: float = 1.0
    dropped: float = 0.0
    push_s: float = 0.0
    """Seconds of a push to `push_workers`."""
    push_workers: int = 1
    weight_bytes: float = 0.0
    tokens: float = 0.0
    """Sampled tokens of a trained group."""
    group_bytes: float = 0.0
    """Size of a stored group."""

    def scaled(self, before: BatchConfig, after: BatchConfig) -> Rates:
        """Return the rates for batches of other sizes: all that is done for a rollout takes as long as before."""
        siblings = after.group_size / before.group_size
        return replace(
            self,
            learner_s=self.learner_s * siblings * after.groups_per_step / before.groups_per_step,
            group_s=self.group_s * siblings,
            tokens=self.tokens * siblings,
            group_bytes=self.group_bytes * siblings,
        )

    def with_waits(self, median_s: float, *, siblings: int) -> Rates:
        """Return the rates of episodes that also wait for tools or rewards, each a lognormal time of deviation 1.

        A group waits for the slowest of its `siblings`.
        """
        random = Random(0)
        waits = [[median_s * math.exp(random.gauss(0, 1)) for _ in range(siblings)] for _ in range(DRAWN)]
        latencies = tuple(random.choice(self.latencies) + max(each) for each in waits)
        most, mean = fmean(map(max, waits)), fmean(map(fmean, waits))
        before = fmean(self.latencies)
        return replace(self, latencies=latencies, playing=(self.playing * before + mean) / (before + most))

    def to_push_s(self, workers: int, link_gb_s: float) -> float:
        """Return the time of a push. `link_gb_s`: what the learner's link carries, over which a tree of workers is fed; 0: all
        of them read the learner's memory.
        """
        copies = math.ceil(math.log2(workers + 1)) - math.ceil(math.log2(self.push_workers + 1))
        carried = max(0, copies) * self.weight_bytes / (link_gb_s * 1e9) if link_gb_s else 0.0
        messages = LEARNER_PUSH_S * max(0, workers - self.push_workers)
        return self.push_s + messages + carried


def world_of(config: Config, rates: Rates, *, workers: int, cores: int, link_gb_s: float = 0.0) -> SimulatedWorld:
    """Return the world of a run. Raises ConfigError for what the model does not have."""
    if config.replay.max_uses > 1 or config.replay.samples_per_insert is not None:
        raise ConfigError("simulate has no model of groups that train more than once; set replay.max_uses to 1")
    worker, limits = config.worker, config.limits
    in_flight = worker.groups_at_most if worker.groups_in_flight == "auto" else worker.groups_in_flight
    return SimulatedWorld(
        groups_per_step=limits.groups_per_step,
        max_age=limits.max_age,
        learner_s=rates.learner_s,
        learner_varies=rates.learner_varies,
        learner_threads=config.learner.parallel.ranks,
        workers=workers,
        groups_per_worker=in_flight,
        group_s=rates.group_s / worker.engines,
        alone_s=rates.alone_s,
        work=partial(_drawn, rates.sizes) if rates.sizes else some_vary,
        latency=partial(_drawn, rates.latencies),
        playing=rates.playing,
        dropped=rates.dropped,
        push_s=rates.to_push_s(workers, link_gb_s),
        pushes=PushPolicy.of(config),
        lowest_pace=max(LOWEST, config.wire.push_every_steps + 1),
        cores=cores,
    )


def fixed_pace(config: Config) -> float | None:
    """Return the pace that the configuration fixes; None: the controller decides."""
    pace = config.staleness.pace
    return None if pace == "auto" else config.staleness.max_age + 1 if pace == "full" else float(pace)


def _drawn(values: tuple[float, ...], random: Random) -> float:
    return random.choice(values)
