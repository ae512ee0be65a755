"""Decide on how many machines the learner of a cluster runs: on as many as there are, between `launch.learner_nodes_min` and
`launch.learner_nodes`. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from async_rl.config import Config
from async_rl.errors import ConfigError


def ranks_per_machine(config: Config) -> int:
    """Return how many of the learner's ranks a machine has, however many machines there are. Raises ConfigError."""
    ranks, nodes = config.learner.parallel.ranks, config.launch.learner_nodes
    if ranks % nodes:
        raise ConfigError(
            f"launch.learner_nodes ({nodes}) must divide the learner's {ranks} ranks (learner.parallel), so that every machine "
            "gets as many"
        )
    return ranks // nodes


def learner_sizes(config: Config) -> Sequence[int]:
    """Return the numbers of machines that the learner can run on, largest first. Raises ConfigError.

    Fewer machines have fewer data-parallel ranks. A number whose ranks do not hold whole copies of the model is left out.
    """
    each, launch, parallel = ranks_per_machine(config), config.launch, config.learner.parallel
    sizes = [
        nodes for nodes in range(launch.learner_nodes, launch.fewest_nodes - 1, -1) if nodes * each % parallel.fewest_ranks == 0
    ]
    if sizes[-1:] != [launch.fewest_nodes]:
        raise ConfigError(
            f"launch.learner_nodes_min ({launch.fewest_nodes}): the learner would have {launch.fewest_nodes * each} ranks, but "
            f"learner.parallel needs {parallel.fewest_ranks} or a multiple"
        )
    return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerNodes:
    """On how many machines the learner is, or waits to be; `after` returns what has seen the cluster once more.

    Another number is chosen when it was the best one for `resize_s` without a break, because each change costs a restart.
    """

    sizes: Sequence[int]
    """Possible numbers, largest first."""
    resize_s: float
    nodes: int
    better: int | None = None
    """The number that was possible instead, since `since`."""
    since: float = 0.0

    def after(self, machines: int | None, now: float) -> LearnerNodes:
        """`machines`: those that the learner has, and those that are free for it; None: it is being placed just now."""
        best = next((size for size in self.sizes if machines is not None and size <= machines), None)
        if best is None or best == self.nodes:
            return replace(self, better=None)
        if best != self.better:
            return replace(self, better=best, since=now)
        if now - self.since < self.resize_s:
            return self
        return replace(self, nodes=best, better=None)
