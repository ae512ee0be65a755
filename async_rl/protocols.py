"""The interfaces between parts. Concrete classes are named only in composition roots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from async_rl.imports.old_names import old_names
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


class Tokenizer(Protocol):
    vocab_size: int
    end_id: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def render(self, prompt: str | Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Token ids of a whole prompt, with special tokens and the generation prompt."""
        ...

    def render_reply(self, *messages: Message, after_end: bool) -> list[int]:
        """Token ids between two sampled answers of a conversation: `messages` with what the chat template puts around them.

        `after_end`: the previous answer already ends with the end token.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationArgs:
    """Arguments of one generation. None: the run's default. A backend refuses arguments that it does not support by name."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0: all."""
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    seed: int | None = None

    def over(self, defaults: GenerationArgs) -> GenerationArgs:
        """These arguments, with unset ones taken from `defaults`."""
        chosen = {
            name: own if (own := getattr(self, name)) is not None else getattr(defaults, name)
            for name in self.__dataclass_fields__
        }
        return GenerationArgs(**chosen)


class ContextOverflow(ValueError):
    """The prompt fills the model's context."""


Prompt = str | Sequence[Message] | Sequence[int]
"""Text and messages are rendered; token ids are used as they are."""


Returns = Literal["text", "tokens", "logprobs"]
"""What the completions of an inference backend carry: only text; the sampled token ids too; or also log-probabilities and
versions, without which they cannot be trained on."""


@runtime_checkable
class InferenceInterface(Protocol):
    """A model as an agent sees it."""

    tokenizer: Tokenizer

    @property
    def returns(self) -> Returns:
        """What its completions carry."""
        ...

    async def generate(self, prompt: Prompt, args: GenerationArgs | None = None) -> Completion:
        """Sample one continuation.

        Blocks while the engine is full or has no weights yet. Cancelling frees the engine's place at once.
        Raises ContextOverflow if the prompt leaves no room for an answer.
        """
        ...


class Session(Protocol):
    """An OpenAI-compatible endpoint for one episode, and a record of what was generated there."""

    @property
    def base_url(self) -> str:
        """http://HOST:PORT/s/EPISODE/v1"""
        ...

    @property
    def api_key(self) -> str: ...

    @property
    def turns(self) -> Sequence[Completion]:
        """All generations, in the order in which they ended."""
        ...

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The longest conversation, for display."""
        ...

    @property
    def forks(self) -> int:
        """Prompts after the first that do not extend an earlier one: edited history, other tools or system prompt."""
        ...

    def samples(self) -> tuple[Sample, ...]:
        """Token rows, one per branch. Every sampled token is trained in exactly one of them."""
        ...


class Gateway(Protocol):
    """Opens endpoints through which unmodified agents use the model."""

    def session(
        self, inference: InferenceInterface, args: GenerationArgs | None = None, *, name: str = "policy"
    ) -> AbstractAsyncContextManager[Session]:
        """Open an endpoint for one episode. `args` are defaults for its requests; `name` is the model name that it reports."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeContext:
    """The context of one episode, passed to the agent."""

    ticket: Ticket
    sibling: int
    """Index of the rollout in its group, 0 to group_size - 1."""
    seed: int
    """Differs between the rollouts of a group; the same if the attempt is played again."""
    gateway: Gateway | None = None
    """For agents that use HTTP; None if no gateway runs."""
    policies: Mapping[str, InferenceInterface] = field(default_factory=dict[str, InferenceInterface])
    """Other models by their name in the configuration: opponents, judges, simulated users. Never trained."""


class Agent(Protocol):
    """Plays the episodes of one environment. This is the interface that user code implements."""

    def task(self, index: int) -> Task:
        """Return the index-th task of an endless stream. Pure: the same index always gives the same task."""
        ...

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        """Play and score one episode. An exception makes it a failed rollout; cancellation ends the episode."""
        ...


@runtime_checkable
class FiniteAgent(Agent, Protocol):
    """An agent with a finite number of tasks, which repeat after the last one."""

    @property
    def num_tasks(self) -> int | None:
        """Number of distinct tasks; later indexes repeat them. None: endless."""
        ...


@runtime_checkable
class GroupAgent(Agent, Protocol):
    """Plays the rollouts of a task together because they depend on each other: players of one game, preference pairs."""

    async def rollout_group(
        self, task: Task, inference: InferenceInterface, contexts: Sequence[EpisodeContext]
    ) -> Sequence[Rollout]:
        """Return one rollout per context, in order. An exception fails all of them; to fail one, return a failed rollout."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rollout worker, or an evaluator while it takes a version, as a receiver of weights."""

    id: str
    host: str
    version: int
    """The version that its engine serves; -1 before the first push."""
    device: str
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that receive weights; none on a CPU."""
    catches_up: str = ""
    """Source from which it is loading weights on its own (snapshot, another worker); "" if none. The learner does not push to
    it meanwhile."""
    is_evaluator: bool = False
    """It rolls out no groups, and leaves once it has the version."""


class Board(Protocol):
    """Small shared state of a run: settings to agree on, present workers, versions, messages. Backed by Redis."""

    async def agree(self, role: str, facts: Mapping[str, str]) -> None:
        """Store the facts if none are stored for the role, else compare. Raises FleetMismatch naming what differs."""
        ...

    async def announce(self, member: Member, ttl_s: float) -> VersionRecord | None:
        """List a worker for `ttl_s` seconds, or renew and update its listing. Returns the live version, as `live_version`."""
        ...

    async def leave(self, member_id: str) -> None: ...

    async def members(self) -> list[Member]:
        """Those that are listed, ordered by id."""
        ...

    async def live_version(self) -> VersionRecord | None: ...

    async def fence(self) -> int | None:
        """The fence of the latest learner; None before the first."""
        ...

    async def versions(self) -> list[VersionRecord]: ...

    async def post(self, topic: str, message: Mapping[str, Any]) -> None:
        """Append a message to a topic, which keeps only recent ones."""
        ...

    async def read(self, topic: str, after: str, wait_s: float) -> list[tuple[str, dict[str, Any]]]:
        """Messages after a position ("0": from the oldest kept, "$": only new ones), with their positions.

        Blocks for at most `wait_s` until there is one.
        """
        ...

    async def write_note(self, name: str, text: bytes, ttl_s: float, *, fence: int) -> None:
        """Store `text` under `name` for `ttl_s` seconds, replacing an earlier note. Does nothing if the fence is outdated."""
        ...

    async def note(self, name: str) -> bytes | None:
        """The note; None if there is none or it has expired."""
        ...


class GroupStores(Protocol):
    """torch.distributed stores through which processes form process groups. Backed by Redis."""

    def open(self, name: str) -> Store:
        """Open the store of this name; all processes that open it share its keys. Its methods block, on any thread.

        Usable until these stores are closed, without keeping a reference.
        """
        ...


class MetricsSink(Protocol):
    """A destination of metrics. `log` never blocks training; `close` flushes."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


__getattr__ = old_names(__name__)
