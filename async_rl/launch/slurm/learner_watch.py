"""Whether the run still has a learner in Slurm's queue: asked by workers and evaluator, which do not outlive it for long."""

from __future__ import annotations

import asyncio

import structlog

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.launch.slurm import queue
from async_rl.launch.slurm.scripts import kind_of

log = structlog.get_logger("async_rl.fleet")

LOOK_S = 120.0
"""Seconds between two looks at the queue. Slurm tells a job only of the end of jobs that it depends on before it starts."""


class LearnerWatch:
    """Sees that the queue has no learner job of the run any more: the last one was cancelled, or killed before it could end the
    other jobs.

    waits for:    a queue with other jobs of the run alone
    unblocked by: the next look, every LOOK_S
    """

    def __init__(self, config: Config, *, knows_learner: bool) -> None:
        """`knows_learner`: there was a learner job before; until then it may yet be submitted."""
        self._config, self._knows_learner = config, knows_learner

    async def until_gone(self) -> None:
        while not await self.is_gone():  # noqa: ASYNC110 - the queue tells nobody of its changes
            await asyncio.sleep(LOOK_S)

    async def is_gone(self) -> bool:
        """Look now. False also if Slurm does not answer."""
        try:
            jobs = await asyncio.to_thread(queue.jobs_in, self._config.run_folder)
        except ConfigError as error:
            log.warning(f"whether the run still has a learner is not known: {error}")
            return False
        has_learner = any(kind_of(self._config, job.name) == "learner" for job in jobs)
        self._knows_learner = self._knows_learner or has_learner
        if not jobs or has_learner or not self._knows_learner:  # no jobs: not even the one that asks
            return False
        log.warning("Slurm's queue has no learner job of this run any more: this process drains, and is not queued again")
        return True
