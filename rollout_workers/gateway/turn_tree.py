"""The generations of one episode as a tree: each continues an earlier one or starts a new branch.

        ┌ given ─ sampled ┬ given ─ sampled ─ given ─ sampled     one row of tokens for each leaf
    ────┤                 └ given ─ sampled
        └ given ─ sampled                                         a history that continues nothing sampled: a fork

Pure: no tokenizer, no network. Tokens are stored as they were sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from async_rl.types import Completion, Message, Sample
from rollout_workers.chat.token_row import TokenRow

History = Sequence[object]
"""What a client repeats to continue: tools and canonical messages, or text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlace:
    """The position of a generation in the tree, found before it is sampled."""

    parent: SampledTurn | None
    given: tuple[int, ...]
    """Token ids after the parent's row; without a parent, the whole prompt."""

    @property
    def prompt(self) -> list[int]:
        return [*(self.parent.row() if self.parent is not None else ()), *self.given]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledTurn:
    """One generation and its position."""

    place: TurnPlace
    completion: Completion
    conversation: tuple[Message, ...]
    """All messages including the answer, for people to read."""
    history: History
    """What a client sends to continue from here; empty for clients that send token ids."""
    children: list[SampledTurn] = field(default_factory=list["SampledTurn"])

    def row(self) -> list[int]:
        """All token ids up to the end of the answer."""
        return [token for turn in self.path() for token in turn.own_ids]

    @property
    def own_ids(self) -> list[int]:
        return [*self.place.given, *self.completion.token_ids.tolist()]

    def path(self) -> list[SampledTurn]:
        """The turns from the root to this one."""
        upwards: list[SampledTurn] = [self]
        while (parent := upwards[-1].place.parent) is not None:
            upwards.append(parent)
        return upwards[::-1]


class TurnTree:
    def __init__(self) -> None:
        self.turns: list[SampledTurn] = []
        """All turns, in the order in which they were sampled."""

    @property
    def forks(self) -> int:
        """Number of prompts beyond the first that continued nothing sampled. A repeated prompt does not count."""
        return max(0, len({turn.place for turn in self.turns if turn.place.parent is None}) - 1)

    def find_history(self, history: History) -> SampledTurn | None:
        """The turn with the longest history that `history` begins with; the newest of equals."""
        repeated = [turn for turn in self.turns if turn.history and history[: len(turn.history)] == turn.history]
        return max(reversed(repeated), key=lambda turn: len(turn.history), default=None)

    def find_tokens(self, token_ids: Sequence[int]) -> SampledTurn | None:
        """The turn whose row is the longest prefix of `token_ids`; the newest of equals."""
        prompt = list(token_ids)
        longest, found = -1, None
        waiting = [(turn, 0) for turn in self.turns if turn.place.parent is None]
        while waiting:
            turn, start = waiting.pop()
            end = start + len(turn.own_ids)
            if prompt[start:end] == turn.own_ids:
                if end > longest:
                    longest, found = end, turn
                waiting += [(child, end) for child in turn.children]
        return found

    def place_tokens(self, token_ids: Sequence[int]) -> TurnPlace:
        """The position of a prompt of token ids: below the longest row that it begins with."""
        parent = self.find_tokens(token_ids)
        return TurnPlace(parent=parent, given=tuple(token_ids[len(parent.row()) if parent is not None else 0 :]))

    def add(
        self, place: TurnPlace, completion: Completion, *, conversation: tuple[Message, ...], history: History
    ) -> SampledTurn:
        """Append a generation at its position."""
        turn = SampledTurn(place=place, completion=completion, conversation=conversation, history=history)
        self.turns.append(turn)
        if place.parent is not None:
            place.parent.children.append(turn)
        return turn

    def samples(self) -> tuple[Sample, ...]:
        """One row per leaf. Sampled tokens that rows share are trained on in the first and context in the others."""
        trained: set[int] = set()
        rows: list[Sample] = []
        for leaf in (turn for turn in self.turns if not turn.children):
            row = TokenRow(())
            for turn in leaf.path():
                row.add_given(turn.place.given)
                if id(turn) in trained:
                    row.add_given(turn.completion.token_ids.tolist())
                else:
                    row.add_sampled(turn.completion)
                    trained.add(id(turn))
            rows.append(row.sample())
        return tuple(rows)
