"""The conversation of one model in an episode, kept as messages and as a token row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from async_rl.protocols import ContextOverflow, GenerationArgs, InferenceInterface
from async_rl.types import Completion, Message, Rollout, Sample, Status, Tool
from rollout_workers.chat.replies import reply_ids
from rollout_workers.chat.token_row import TokenRow
from rollout_workers.episodes.rewards import Score

Observation = str | Sequence[Message]
"""What a model reads between two answers. Text becomes a user message if the prompt was a conversation."""


def assistant_message(text: str) -> Message:
    return Message(role="assistant", content=text)


class Dialogue:
    """Call `generate` and `observe` in turn. A text prompt continues as text, messages through the chat template.

    Without a prompt, the first observation is the prompt.
    """

    def __init__(
        self,
        inference: InferenceInterface,
        prompt: Observation | None = None,
        *,
        tools: Sequence[Tool] = (),
        read: Callable[[str], Message] = assistant_message,
    ) -> None:
        """`read` turns an answer into a message and may parse tool calls in it."""
        self._inference = inference
        self._tools, self._read = tools, read
        self._row = TokenRow(())
        self._is_text = False
        self._last: Completion | None = None
        self.num_turns = 0
        self.is_full = False
        """Whether `next_answer` found the context full."""
        self._messages: list[Message] = []
        if prompt is not None:
            self.observe(prompt)

    async def generate(self, args: GenerationArgs | None = None) -> Completion:
        """Sample the next answer. Raises ContextOverflow when the context is full."""
        completion = await self._inference.generate(self._row.token_ids, args)
        self._row.add_sampled(completion)
        self._last = completion
        self.num_turns += 1
        self._messages.append(self._read(completion.text))
        return completion

    async def next_answer(self, args: GenerationArgs) -> Completion | None:
        """Sample the next answer; None when the context is full. Raises ContextOverflow when the prompt alone fills it."""
        try:
            return await self.generate(args)
        except ContextOverflow:
            if not self.num_turns:
                raise
            self.is_full = True
            return None

    def observe(self, observation: Observation) -> None:
        """Append an observation, which the model reads before its next answer."""
        messages = [Message(role="user", content=observation)] if isinstance(observation, str) else list(observation)
        tokenizer = self._inference.tokenizer
        if not self._messages:
            self._is_text = isinstance(observation, str)
            given = tokenizer.render(observation, self._tools)
        elif self._is_text:
            given = tokenizer.encode(text_of(observation))
        elif self._last is not None:
            given = reply_ids(tokenizer, self._last, *messages)
        else:
            raise RuntimeError("a dialogue begins with its prompt and an answer to it: observe() comes after generate()")
        self._row.add_given(given)
        self._messages += messages

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages, for people to read. Training uses the token row instead."""
        return tuple(self._messages)

    @property
    def samples(self) -> tuple[Sample, ...]:
        return (self._row.sample(),)

    def rollout(self, score: Score, *, is_cut: bool = False, **metrics: float) -> Rollout:
        """The rollout of the episode, with the metric `turns`. It is truncated if `is_cut` or if the context is full."""
        return Rollout(
            samples=self.samples,
            reward=score.reward,
            status=Status.TRUNCATED if is_cut or self.is_full else Status.OK,
            reward_parts=score.parts,
            metrics={"turns": self.num_turns, **metrics},
            conversation=self.conversation,
        )


def text_of(observation: Observation) -> str:
    return observation if isinstance(observation, str) else "\n".join(message.content for message in observation)
