"""The inference an agent gets: generations have their time limit and are measured, and what they raise is remembered."""

from __future__ import annotations

import asyncio

from async_rl.protocols import GenerationArgs, InferenceInterface, Prompt, Returns
from async_rl.types import Completion
from rollout_workers.episodes.group_timeline import current_clock
from rollout_workers.episodes.leaked_tasks import outside_episodes
from rollout_workers.episodes.stage_timeouts import current_timeouts, stage
from rollout_workers.inference.interface import Inference, returns_of


class WatchedInference(Inference):
    """Remembers the last error of the engine, so that it is not attributed to the environment."""

    def __init__(self, inference: InferenceInterface) -> None:
        self._inference = inference
        self._loop = asyncio.get_running_loop()
        # Read here: a gateway generates for an episode in tasks with another context.
        self._timeouts, self._clock = current_timeouts(), current_clock()
        self.tokenizer = inference.tokenizer
        self.returns: Returns = returns_of(inference)
        self.raised: Exception | None = None

    async def _generate(self, prompt: Prompt, args: GenerationArgs) -> Completion:
        since = self._clock.timeline.now() if self._clock is not None else 0.0
        try:
            async with stage("inference", self._timeouts):
                with outside_episodes():
                    completion = await self._inference.generate(prompt, args)
        except Exception as error:
            self.raised = error
            raise
        if self._clock is not None:
            self._clock.add_generation(completion, since)
        return completion
