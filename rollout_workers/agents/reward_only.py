"""The agent that needs only a reward: say what the tasks are and what an answer is worth, and it plays the episodes.

prompt ─▶ generate ─▶ observation? ─▶ generate ─▶ ... ─▶ reward
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from async_rl.protocols import ContextOverflow, EpisodeContext, GenerationArgs, InferenceInterface, Tokenizer
from async_rl.types import Message, Rollout, Scalar, Status, StopReason, Task, Turn
from rollout_workers.agents.token_row import TokenRow
from rollout_workers.rewards import RewardFailed, Score, as_score


@dataclass(kw_only=True)
class RewardOnlyAgent(ABC):
    """Subclass it with `task` and `reward`; for several turns add `get_observation` and `trajectory_reward`.

    Decorate the subclass with `@dataclass(kw_only=True)` and its fields become the `args` of its configuration.
    """

    name: str
    """Under which the environment stands in the configuration."""
    seed: int = 0

    max_turns = 64
    """The episode ends after this many generations, whatever the environment would still say."""
    length_is_truncation = True
    """Whether an episode whose last answer ran into its length limit counts as truncated."""

    @abstractmethod
    def task(self, index: int) -> Task:
        """The index-th task of an endless stream. Pure: draw what is random from `self.random(index)`."""

    async def reward(self, task: Task, response: str) -> float | Score:
        """What the last answer is worth."""
        raise NotImplementedError(f"{type(self).__name__} must define reward or trajectory_reward")

    async def trajectory_reward(self, task: Task, turns: Sequence[Turn]) -> float | Score:
        """What the whole episode is worth."""
        return await self.reward(task, turns[-1].text)

    async def get_observation(self, task: Task, turns: Sequence[Turn]) -> str | None:
        """What the environment answers to the last turn; None ends the episode."""
        return None

    def generation_args(self, task: Task) -> GenerationArgs:
        """How to sample; what is not set here follows the run's `sampling`."""
        return GenerationArgs()

    def random(self, index: int) -> random.Random:
        """Chance for the index-th task, the same in every process."""
        return random.Random(f"{self.seed}/{self.name}/{index}")

    def new_task(self, index: int, prompt: str | tuple[Message, ...], *, answer: str = "", **data: Scalar) -> Task:
        key = f"{self.name}/{self.seed}/{index}"
        return Task(key=key, environment=self.name, prompt=prompt, answer=answer, data=data)

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        tokenizer = inference.tokenizer
        row = TokenRow(tokenizer.render(task.prompt))
        turns: list[Turn] = []
        while True:
            try:
                completion = await inference.generate(row.token_ids, self.generation_args(task))
            except ContextOverflow:
                if not turns:
                    raise
                return await self._scored(task, row, turns, is_cut=True)
            row.add_sampled(completion)
            turns.append(Turn(completion=completion))
            observation = await self.get_observation(task, turns) if len(turns) < self.max_turns else None
            if observation is None:
                hit_limit = completion.stop_reason is StopReason.LENGTH
                return await self._scored(task, row, turns, is_cut=hit_limit and self.length_is_truncation)
            turns[-1] = replace(turns[-1], observation=observation)
            row.add_given(_observed(tokenizer, task, turns[-1]))

    async def _scored(self, task: Task, row: TokenRow, turns: Sequence[Turn], *, is_cut: bool) -> Rollout:
        try:
            score = as_score(await self.trajectory_reward(task, turns))
        except Exception as error:
            raise RewardFailed from error
        sample = row.sample()
        return Rollout(
            samples=(sample,),
            reward=score.reward,
            status=Status.TRUNCATED if is_cut else Status.OK,
            reward_parts=score.parts,
            metrics={"turns": len(turns), "length": sample.num_sampled},
            conversation=_conversation(task, turns),
        )


def _observed(tokenizer: Tokenizer, task: Task, turn: Turn) -> list[int]:
    """Only the observation is tokenized. A text prompt goes on as text, a conversation in the words of its template."""
    if isinstance(task.prompt, str):
        return tokenizer.encode(turn.observation)
    ended = turn.completion.stop_reason is StopReason.END
    return tokenizer.render_reply(Message(role="user", content=turn.observation), after_end=ended)


def _conversation(task: Task, turns: Sequence[Turn]) -> tuple[Message, ...]:
    messages = [Message(role="user", content=task.prompt)] if isinstance(task.prompt, str) else list(task.prompt)
    for turn in turns:
        messages.append(Message(role="assistant", content=turn.text))
        if turn.observation:
            messages.append(Message(role="user", content=turn.observation))
    return tuple(messages)
