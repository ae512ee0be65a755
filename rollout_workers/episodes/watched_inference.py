"""The inference an agent gets: generations have their time limit, and what they raise is remembered."""

from __future__ import annotations

import asyncio
from functools import cache

from async_rl.protocols import GenerationArgs, InferenceInterface, Prompt, ReturnsLogprobs, ReturnsText, ReturnsTokens
from async_rl.types import Completion
from rollout_workers.episodes.leaked_tasks import outside_episodes
from rollout_workers.episodes.stage_timeouts import current_timeouts, stage
from rollout_workers.inference.interface import Inference


class WatchedInference(Inference):
    """Remembers the last error of the engine, so that it is not attributed to the environment."""

    def __init__(self, inference: InferenceInterface) -> None:
        self._inference = inference
        self._loop = asyncio.get_running_loop()
        # Read here: a gateway generates for an episode in tasks with another context.
        self._timeouts = current_timeouts()
        self.tokenizer = inference.tokenizer
        self.raised: Exception | None = None

    async def _generate(self, prompt: Prompt, args: GenerationArgs) -> Completion:
        try:
            async with stage("inference", self._timeouts):
                with outside_episodes():
                    return await self._inference.generate(prompt, args)
        except Exception as error:
            self.raised = error
            raise


def watch_inference(inference: InferenceInterface) -> WatchedInference:
    """It says of itself what the backend says: agents ask whether it returns tokens."""
    marks = (mark for mark in (ReturnsLogprobs, ReturnsTokens, ReturnsText) if isinstance(inference, mark))
    return _with_mark(next(marks, None))(inference)


@cache
def _with_mark(mark: type | None) -> type[WatchedInference]:
    return WatchedInference if mark is None else type(f"WatchedInference{mark.__name__}", (WatchedInference, mark), {})
