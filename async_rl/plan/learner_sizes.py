"""On how many machines the learner of a cluster can run, between `launch.learner_nodes_min` and `launch.learner_nodes`."""

from __future__ import annotations

from collections.abc import Sequence

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
