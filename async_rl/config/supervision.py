"""The section of the configuration that says how the processes of a run are kept alive."""

from __future__ import annotations

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from async_rl.config.section import Section
from async_rl.supervision.processes.restarts import RestartPolicy


class SupervisionConfig(Section):
    """What `async-rl run` and `train` do about processes that crash or hang (docs/operations.md)."""

    restarts: NonNegativeInt = 3
    """Restarts of one process within `window_s`. After that a worker or evaluator is left out for `window_s` while others work;
    without any other worker, or for the learner and the Redis server, the run ends with exit code 12."""
    window_s: PositiveFloat = 300.0
    backoff_s: NonNegativeFloat = 0.5
    """Pause before the first restart; each further one within the window waits twice as long."""
    silence_s: PositiveFloat = 300.0
    """A process that shows no sign of life for so long is killed and started again."""

    @property
    def policy(self) -> RestartPolicy:
        return RestartPolicy(limit=self.restarts, window_s=self.window_s, backoff_s=self.backoff_s, silence_s=self.silence_s)
