"""The `supervision` section: when the processes of a run are restarted or killed."""

from __future__ import annotations

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from async_rl.config.section import Section
from async_rl.supervision.processes.restarts import RestartPolicy


class SupervisionConfig(Section):
    """How `async-rl run` and `train` handle processes that crash or hang (docs/operations.md)."""

    restarts: NonNegativeInt = 3
    """Maximum restarts of one process within `window_s`. A worker or evaluator that exceeds it is not restarted for another
    `window_s` while the remaining workers go on. If no other worker is left, or the process is the learner or the Redis server,
    the run ends with exit code 12."""
    window_s: PositiveFloat = 300.0
    """Seconds over which `restarts` are counted."""
    backoff_s: NonNegativeFloat = 0.5
    """Seconds before the first restart; the delay doubles with each further restart within the window."""
    silence_s: PositiveFloat = 300.0
    """Seconds without a heartbeat after which a process is killed and restarted. It counts as a crash."""
    work_limit_s: NonNegativeFloat = 3600.0
    """Seconds that one unit of blocking work may take: a training step, an engine step, loading or writing a checkpoint. After
    that the process ends with the thread's name and is restarted. The first of each kind gets five times as long, because it
    compiles. 0: no limit."""

    @property
    def policy(self) -> RestartPolicy:
        return RestartPolicy(limit=self.restarts, window_s=self.window_s, backoff_s=self.backoff_s, silence_s=self.silence_s)
