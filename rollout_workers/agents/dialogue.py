"""One episode from the seat of one model: what it was observation, what it said, and the token row that both make."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from async_rl.protocols import GenerationArgs, InferenceInterface
from async_rl.types import Completion, Message, Sample, Tool
from rollout_workers.chat.replies import reply_ids
from rollout_workers.chat.token_row import TokenRow

Observation = str | Sequence[Message]
"""What a model is observation between two answers. Text is a user's message where the prompt was a conversation."""


def assistant_message(text: str) -> Message:
    return Message(role="assistant", content=text)


class Dialogue:
    """`answer` and `tell` take turns. A text prompt goes on as text, a conversation in the words of its chat template."""

    def __init__(
        self,
        inference: InferenceInterface,
        prompt: str | Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        read: Callable[[str], Message] = assistant_message,
    ) -> None:
        """`read` makes a message of an answer: it may find calls of tools in it."""
        self._inference = inference
        self._row = TokenRow(inference.tokenizer.render(prompt, tools))
        self._is_text = isinstance(prompt, str)
        self._read = read
        self._last: Completion | None = None
        self._messages = [Message(role="user", content=prompt)] if isinstance(prompt, str) else list(prompt)

    async def generate(self, args: GenerationArgs | None = None) -> Completion:
        """What the model says next. Raises ContextOverflow when there is no room left for it."""
        completion = await self._inference.generate(self._row.token_ids, args)
        self._row.add_sampled(completion)
        self._last = completion
        self._messages.append(self._read(completion.text))
        return completion

    def observe(self, observation: Observation) -> None:
        """What the model hears before its next answer."""
        messages = [Message(role="user", content=observation)] if isinstance(observation, str) else list(observation)
        self._messages += messages
        tokenizer = self._inference.tokenizer
        if self._is_text:
            self._row.add_given(tokenizer.encode(text_of(observation)))
        elif self._last is not None:
            self._row.add_given(reply_ids(tokenizer, self._last, *messages))
        else:
            raise RuntimeError("a dialogue begins with its prompt and the answer to it: nothing can be observation before")

    @property
    def conversation(self) -> tuple[Message, ...]:
        """For people to read: nothing is ever tokenized from it."""
        return tuple(self._messages)

    @property
    def samples(self) -> tuple[Sample, ...]:
        return (self._row.sample(),)


def text_of(observation: Observation) -> str:
    return observation if isinstance(observation, str) else "\n".join(message.content for message in observation)
