"""The agent that needs only tasks and a reward; it plays the episodes itself.

prompt ─▶ generate ─▶ observation? ─▶ generate ─▶ ... ─▶ reward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from async_rl.protocols import EpisodeContext, InferenceInterface
from async_rl.types import Message, Rollout, StopReason, Task, Tool, Turn
from rollout_workers.agents.dialogue import Dialogue, assistant_message, text_of
from rollout_workers.agents.environment import Environment
from rollout_workers.episodes.rewards import as_score
from rollout_workers.episodes.stage_timeouts import scoring, stage
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
        is_cut = False
        while (completion := await dialogue.next_answer(self.generation_args(task))) is not None:
            turns.append(Turn(completion=completion))
            observation = None
            if len(turns) < self.max_turns:
                async with stage("environment"):
                    observation = await awaited(self.get_observation(task, turns))
            if observation is None:
                is_cut = self.length_is_truncation and completion.stop_reason is StopReason.LENGTH
                break
            turns[-1] = replace(turns[-1], observation=text_of(observation))
            dialogue.observe(observation)
        async with scoring():
            score = as_score(await awaited(self.trajectory_reward(task, turns)))
        return dialogue.rollout(score, is_cut=is_cut, length=sum(len(turn.completion.token_ids) for turn in turns))
