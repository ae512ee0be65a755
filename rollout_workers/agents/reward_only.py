"""The agent that needs only tasks and a reward; it plays the episodes itself.

prompt ─▶ generate ─▶ observation? ─▶ generate ─▶ ... ─▶ reward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from async_rl.protocols import ContextOverflow, EpisodeContext, InferenceInterface
from async_rl.types import Message, Rollout, Status, StopReason, Task, Tool, Turn
from rollout_workers.agents.dialogue import Dialogue, Observation, assistant_message, text_of
from rollout_workers.agents.environment import Environment
from rollout_workers.episodes.rewards import RewardFailed, as_score
from rollout_workers.episodes.stage_timeouts import stage
from rollout_workers.user_functions import awaited


@dataclass(kw_only=True)
class RewardOnlyAgent(Environment):
    """An environment that plays its own episodes. Subclass it with `task` and `reward`, and what else Environment offers."""

    def offered_tools(self, task: Task) -> Sequence[Tool]:
        """Tools that the prompt offers to the model."""
        return ()

    def read(self, text: str) -> Message:
        """Turn an answer into a message of the conversation."""
        return assistant_message(text)

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        dialogue = Dialogue(inference, task.prompt, tools=self.offered_tools(task), read=self.read)
        turns: list[Turn] = []
        while True:
            try:
                completion = await dialogue.generate(self.generation_args(task))
            except ContextOverflow:
                if not turns:
                    raise
                return await self._scored(task, dialogue, turns, is_cut=True)
            turns.append(Turn(completion=completion))
            observation = await self._observed(task, turns) if len(turns) < self.max_turns else None
            if observation is None:
                hit_limit = completion.stop_reason is StopReason.LENGTH
                return await self._scored(task, dialogue, turns, is_cut=hit_limit and self.length_is_truncation)
            turns[-1] = replace(turns[-1], observation=text_of(observation))
            dialogue.observe(observation)

    async def _observed(self, task: Task, turns: Sequence[Turn]) -> Observation | None:
        async with stage("environment"):
            return await awaited(self.get_observation(task, turns))

    async def _scored(self, task: Task, dialogue: Dialogue, turns: Sequence[Turn], *, is_cut: bool) -> Rollout:
        try:
            async with stage("reward"):
                score = as_score(await awaited(self.trajectory_reward(task, turns)))
        except Exception as error:
            raise RewardFailed from error
        return Rollout(
            samples=dialogue.samples,
            reward=score.reward,
            status=Status.TRUNCATED if is_cut else Status.OK,
            reward_parts=score.parts,
            metrics={"turns": len(turns), "length": sum(len(turn.completion.token_ids) for turn in turns)},
            conversation=dialogue.conversation,
        )
