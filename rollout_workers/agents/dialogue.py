"""The conversation of one model in an episode, kept as messages and as a token row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from async_rl.protocols import GenerationArgs, InferenceInterface
from async_rl.types import Completion, Message, Sample, Tool
from rollout_workers.chat.replies import reply_ids
from rollout_workers.chat.token_row import TokenRow

Observation = str | Sequence[Message]
"""What a model reads between two answers. Text becomes a user message if the prompt was a conversation."""


def assistant_message(text: str) -> Message:
    return Message(role="assistant", content=text)


class Dialogue:
    """Call `generate` and `observe` in turn. A text prompt continues as text, messages through the chat template."""

    def __init__(
        self,
        inference: InferenceInterface,
        prompt: str | Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        read: Callable[[str], Message] = assistant_message,
    ) -> None:
        """`read` turns an answer into a message and may parse tool calls in it."""
        self._inference = inference
        self._row = TokenRow(inference.tokenizer.render(prompt, tools))
        self._is_text = isinstance(prompt, str)
        self._read = read
        self._last: Completion | None = None
        self._messages = [Message(role="user", content=prompt)] if isinstance(prompt, str) else list(prompt)

    async def generate(self, args: GenerationArgs | None = None) -> Completion:
        """Sample the next answer. Raises ContextOverflow when the context is full."""
        completion = await self._inference.generate(self._row.token_ids, args)
        self._row.add_sampled(completion)
        self._last = completion
        self._messages.append(self._read(completion.text))
        return completion

    def observe(self, observation: Observation) -> None:
        """Append an observation, which the model reads before its next answer."""
        messages = [Message(role="user", content=observation)] if isinstance(observation, str) else list(observation)
        self._messages += messages
        tokenizer = self._inference.tokenizer
        if self._is_text:
            self._row.add_given(tokenizer.encode(text_of(observation)))
        elif self._last is not None:
            self._row.add_given(reply_ids(tokenizer, self._last, *messages))
        else:
            raise RuntimeError("a dialogue begins with its prompt and an answer to it: observe() comes after generate()")

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages, for people to read. Training uses the token row instead."""
        return tuple(self._messages)

    @property
    def samples(self) -> tuple[Sample, ...]:
        return (self._row.sample(),)


def text_of(observation: Observation) -> str:
    return observation if isinstance(observation, str) else "\n".join(message.content for message in observation)
