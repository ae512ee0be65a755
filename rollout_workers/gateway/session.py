"""The endpoint of one episode: samples for its requests and keeps the tree of what was said.

request ──▶ find its place in the tree ──▶ inference.generate(token ids) ──▶ a turn of the tree ──▶ response
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from async_rl.config.rollout import GatewayConfig
from async_rl.protocols import GenerationArgs, InferenceInterface
from async_rl.types import Completion, Message, Sample, StopReason, Tool
from rollout_workers.chat.replies import reply_ids
from rollout_workers.chat.tool_calls import parse
from rollout_workers.gateway.admission import Admission
from rollout_workers.gateway.canonical import canonical
from rollout_workers.gateway.counters import GatewayCounters
from rollout_workers.gateway.token_texts import complete_text
from rollout_workers.gateway.turn_tree import History, SampledTurn, TurnPlace, TurnTree
from rollout_workers.inference.interface import generate_several


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayAnswer:
    """One choice of a response."""

    turn: SampledTurn
    message: Message
    """The message as the client reads it, and will repeat it."""

    @property
    def completion(self) -> Completion:
        return self.turn.completion

    @property
    def finish_reason(self) -> str:
        if self.completion.stop_reason is StopReason.LENGTH:
            return "length"
        return "tool_calls" if self.message.tool_calls else "stop"


Read = Callable[[Completion], tuple[Message, History]]
"""From a completion to the message for the client, and the history it will send to continue from there."""


@dataclass(kw_only=True, eq=False)
class EpisodeSession:
    """Implements `Session`; the endpoints call `chat`, `continue_text` and `continue_tokens`."""

    api_key: str
    base_url: str
    name: str
    inference: InferenceInterface
    args: GenerationArgs
    """Defaults for its requests."""
    settings: GatewayConfig
    context_tokens: int
    counters: GatewayCounters
    stored: dict[str, tuple[Message, ...]] = field(default_factory=dict[str, tuple[Message, ...]])
    """Conversations by the id of their last response."""

    def __post_init__(self) -> None:
        self.tokenizer = self.inference.tokenizer
        self._admission = Admission(self.settings, self.counters)
        self._tree = TurnTree()

    # -- Session ----------------------------------------------------------------------------------------------------

    @property
    def turns(self) -> Sequence[Completion]:
        return [turn.completion for turn in self._tree.turns]

    @property
    def forks(self) -> int:
        return self._tree.forks

    @property
    def conversation(self) -> tuple[Message, ...]:
        return max((turn.conversation for turn in self._tree.turns), key=len, default=())

    def samples(self) -> tuple[Sample, ...]:
        return self._tree.samples()

    async def close(self) -> None:
        """End all requests and sample nothing more; what was sampled stays."""
        await self._admission.close()

    # -- endpoints --------------------------------------------------------------------------------------------------

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Tool], args: GenerationArgs, *, n: int, parses_calls: bool
    ) -> list[GatewayAnswer]:
        """Answer a conversation. Only the messages after a known answer are rendered."""
        history = (tuple(tools), *map(canonical, messages))

        def read(completion: Completion) -> tuple[Message, History]:
            text = self._visible_text(completion, args.stop)
            said, calls = parse(text, self.settings.tool_calls) if parses_calls else (text, ())
            numbered = tuple(
                replace(call, id=secrets.token_hex(5)[:9]) for call in calls
            )  # Mistral's templates require nine characters
            message = Message(role="assistant", content=said, tool_calls=numbered)
            return message, (*history, canonical(message))

        return await self._sample(self._place_chat(history, messages, tools), args, n, messages, read)

    async def continue_text(self, prompt: str, args: GenerationArgs, *, n: int) -> list[GatewayAnswer]:
        """Continue a text. A part that repeats what was sampled is replaced by the sampled ids."""
        parent = self._tree.find_history(prompt)
        if parent is None:
            place = self._tree.place_tokens(self.tokenizer.render(prompt))
        else:
            place = TurnPlace(parent=parent, given=tuple(self.tokenizer.encode(prompt[len(parent.history) :])))
        return await self._continue(place, args, n, lambda said: prompt + said)

    async def continue_tokens(self, token_ids: Sequence[int], args: GenerationArgs, *, n: int) -> list[GatewayAnswer]:
        """Continue a row of token ids."""
        return await self._continue(self._tree.place_tokens(token_ids), args, n, lambda said: ())

    def _place_chat(self, history: History, messages: Sequence[Message], tools: Sequence[Tool]) -> TurnPlace:
        parent = self._tree.find_history(history)
        if parent is not None:
            reply = messages[len(parent.history) - 1 :]
            if not any(message.role == "system" for message in reply):  # some templates move system messages to the front
                return TurnPlace(parent=parent, given=tuple(reply_ids(self.tokenizer, parent.completion, *reply)))
        return self._tree.place_tokens(self.tokenizer.render(messages, tools))

    async def _continue(
        self, place: TurnPlace, args: GenerationArgs, n: int, history_after: Callable[[str], History]
    ) -> list[GatewayAnswer]:
        before = place.parent.conversation if place.parent is not None else ()
        given = Message(role="user", content=self.tokenizer.decode(place.given))

        def read(completion: Completion) -> tuple[Message, History]:
            said = self._visible_text(completion, args.stop)
            return Message(role="assistant", content=said), history_after(said)

        return await self._sample(place, args, n, (*before, given), read)

    async def _sample(
        self, place: TurnPlace, args: GenerationArgs, n: int, conversation: Sequence[Message], read: Read
    ) -> list[GatewayAnswer]:
        async with self._admission.admit(n):
            completions = await generate_several(self.inference, place.prompt, self._allowed(args).over(self.args), n)
        answers: list[GatewayAnswer] = []
        for completion in completions:
            self.counters.tokens += len(completion.token_ids)
            message, history = read(completion)
            turn = self._tree.add(place, completion, conversation=(*conversation, message), history=history)
            answers.append(GatewayAnswer(turn=turn, message=message))
        return answers

    def _allowed(self, args: GenerationArgs) -> GenerationArgs:
        if not self.settings.override_sampling:
            return args
        return GenerationArgs(max_tokens=args.max_tokens, stop=args.stop, stop_token_ids=args.stop_token_ids)

    def _visible_text(self, completion: Completion, stop: Sequence[str] | None) -> str:
        """The text up to the client's stop string and without an incomplete last character, as OpenAI's servers return it."""
        text = complete_text(completion, self.tokenizer)
        ends = [text.find(mark) for mark in (stop if stop is not None else ()) if mark in text]
        return text[: min(ends)] if ends else text
