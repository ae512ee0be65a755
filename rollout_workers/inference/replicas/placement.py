"""Pure: which GPUs of a machine a worker uses when a run has several processes there."""

from __future__ import annotations

from collections.abc import Mapping

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.launch.commands import WORKER_INDEX


def worker_gpus(config: Config, environment: Mapping[str, str], visible: int) -> list[int]:
    """The numbers of a worker's GPUs, one for each tensor rank of each engine.

    Workers of `async-rl run` use the GPUs after those of the learner, one worker after the other, or share GPUs if there
    are too few. A worker started alone begins at the first visible GPU.
    """
    needed = config.worker.engines * config.worker.tensor
    if needed > visible:
        raise ConfigError(
            f"worker.engines ({config.worker.engines}) x worker.tensor ({config.worker.tensor}) need {needed} GPUs, and this "
            f"process sees {visible}; lower one of them"
        )
    return [(_first(config, environment, visible) + offset) % visible for offset in range(needed)]


def _first(config: Config, environment: Mapping[str, str], visible: int) -> int:
    if WORKER_INDEX not in environment:
        return 0
    needed, learner = config.worker.engines * config.worker.tensor, config.learner.parallel.ranks
    has_room = learner + config.worker.processes * needed <= visible
    return int(environment[WORKER_INDEX]) * needed + (learner if has_room else 0)
