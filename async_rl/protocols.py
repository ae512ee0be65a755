"""The seams: what each part may expect of the others. A concrete class is named only in a composition root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from async_rl.types import (
    Completion,
    Message,
    Rollout,
    Sample,
    Task,
    Ticket,
    Tool,
    VersionRecord,
)

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]


class Clock(Protocol):
    def now(self) -> float:
        """Seconds that never go back; only differences mean anything."""
        ...


class Tokenizer(Protocol):
    vocab_size: int
    end_id: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def render(self, prompt: str | Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """The ids of a whole prompt, special tokens included, ready to be continued by the model."""
        ...

    def render_reply(self, *messages: Message, after_end: bool) -> list[int]:
        """The ids that stand between a sampled answer in a conversation and the next one: what the chat template puts
        around `messages`. `after_end` says that the answer already closed with the end token.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationArgs:
    """Unset (None) means the run's default. What a backend cannot do it refuses by name."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 means all."""
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    seed: int | None = None

    def over(self, defaults: GenerationArgs) -> GenerationArgs:
        """These arguments, with `defaults` where nothing was set."""
        chosen = {
            name: own if (own := getattr(self, name)) is not None else getattr(defaults, name)
            for name in self.__dataclass_fields__
        }
        return GenerationArgs(**chosen)


class ContextOverflow(ValueError):
    """The prompt leaves no room for an answer in the model's context."""


Prompt = str | Sequence[Message] | Sequence[int]
"""Text and messages are rendered once; token ids are taken as they are."""


@runtime_checkable
class InferenceInterface(Protocol):
    """All that an agent sees of a model."""

    tokenizer: Tokenizer

    async def generate(self, prompt: Prompt, args: GenerationArgs | None = None) -> Completion:
        """Sample one continuation.

        Waits while the engine is busy or holds no weights yet. Cancelling it frees the engine's place at once.
        Raises ContextOverflow when the prompt is too long to be answered.
        """
        ...


class ReturnsText:
    """Of a backend whose completions can be read. `isinstance(inference, ReturnsTokens)` asks what else they carry."""


class ReturnsTokens(ReturnsText):
    """Of a backend whose completions carry the token ids that were sampled."""


class ReturnsLogprobs(ReturnsTokens):
    """Of a backend whose completions carry logprobs and versions too: what is sampled here can be trained on."""


class Session(Protocol):
    """An endpoint for one episode, and what was said there. OpenAI-compatible: any agent's SDK can talk to it."""

    @property
    def base_url(self) -> str:
        """http://HOST:PORT/s/EPISODE/v1"""
        ...

    @property
    def api_key(self) -> str: ...

    @property
    def turns(self) -> Sequence[Completion]:
        """Every generation, in the order in which they ended."""
        ...

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The longest one, for people to read."""
        ...

    @property
    def forks(self) -> int:
        """Prompts beyond the first that went on from nothing sampled: edited histories, other tools, other system prompts."""
        ...

    def samples(self) -> tuple[Sample, ...]:
        """Append-only token rows, one for each branch; every sampled token is trained on in exactly one of them."""
        ...


class Gateway(Protocol):
    """Gives episodes endpoints under which an unmodified agent finds the model."""

    def session(
        self, inference: InferenceInterface, args: GenerationArgs | None = None, *, name: str = "policy"
    ) -> AbstractAsyncContextManager[Session]:
        """Open while the episode lasts. `args` are laid under what the agent asks for; `name` is the model's."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeContext:
    """What an agent may know about the episode it plays."""

    ticket: Ticket
    sibling: int
    """0 .. group_size - 1."""
    seed: int
    """Differs between siblings, the same whenever this attempt is played again."""
    gateway: Gateway | None = None
    """For agents that speak HTTP; None where nobody serves."""
    policies: Mapping[str, InferenceInterface] = field(default_factory=dict[str, InferenceInterface])
    """Other models by the name under which they stand in the configuration: opponents, judges, users. Never trained."""


class Agent(Protocol):
    """Plays episodes of one environment: this is what people attach."""

    def task(self, index: int) -> Task:
        """The index-th task of an endless stream. Pure: the same index always gives the same task."""
        ...

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        """Play one episode and score it. Whatever it raises becomes a failed rollout; cancelling it ends the episode."""
        ...


@runtime_checkable
class FiniteAgent(Agent, Protocol):
    """Poses the rows of a table, which come again after the last one."""

    @property
    def num_tasks(self) -> int | None:
        """So many indexes pose every task; later ones only repeat them. None: the tasks never end."""
        ...


@runtime_checkable
class GroupAgent(Agent, Protocol):
    """Plays the siblings of a task together, because they depend on each other: seats of one game, chosen and rejected."""

    async def rollout_group(
        self, task: Task, inference: InferenceInterface, contexts: Sequence[EpisodeContext]
    ) -> Sequence[Rollout]:
        """One rollout for each context, in their order. One that broke is a failed rollout; raising fails all of them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rollout worker as the weight wire sees it."""

    id: str
    host: str
    version: int
    """What its engine serves; -1 before the first push."""
    device: str
    gpu: str = ""
    """Identifies the GPU behind `device` among all machines; empty on a CPU."""
    catches_up: str = ""
    """With what it comes by weights on its own, for people; the learner need not push to it meanwhile. Empty: with nothing."""


class Board(Protocol):
    """Small shared facts of a run: what fleets must agree on, who is there, what is live. Redis behind it."""

    async def agree(self, role: str, facts: Mapping[str, str]) -> None:
        """Write the facts if this is the first to come, else compare. Raises FleetMismatch naming what differs."""
        ...

    async def announce(self, member: Member, ttl_s: float) -> None:
        """Be listed for `ttl_s`. Repeating it keeps the listing alive and updates it."""
        ...

    async def leave(self, member_id: str) -> None: ...

    async def members(self) -> list[Member]:
        """Everybody whose announcement has not expired, by id."""
        ...

    async def live_version(self) -> VersionRecord | None: ...

    async def fence(self) -> int | None:
        """That of the learner which took the run last. None before the first."""
        ...

    async def versions(self) -> list[VersionRecord]: ...

    async def post(self, topic: str, message: Mapping[str, Any]) -> None:
        """Append a message to a topic's log (bounded; only recent messages are kept)."""
        ...

    async def read(self, topic: str, after: str, wait_s: float) -> list[tuple[str, dict[str, Any]]]:
        """Messages after a position ("0" = the oldest kept, "$" = only later ones), with their positions.

        Waits at most `wait_s` for the first.
        """
        ...

    async def write_note(self, name: str, text: bytes, ttl_s: float, *, fence: int) -> None:
        """Keep `text` for `ttl_s`, in the place of what the note said before. Does nothing when another learner has the run."""
        ...

    async def note(self, name: str) -> bytes | None:
        """None where there is none, or it has expired."""
        ...


class GroupStores(Protocol):
    """Stores through which processes exchange addresses, to form process groups of torch.distributed. Redis behind it."""

    def open(self, name: str) -> Store:
        """The store of this name: every process that opens it sees the same keys. Its methods block, on any thread.

        It stays usable for as long as these stores are open; nobody else has to keep a reference to it.
        """
        ...


class MetricsSink(Protocol):
    """Where metrics go. `log` never blocks the step; `close` writes what is left."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...
