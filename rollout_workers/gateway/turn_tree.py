"""What was sampled in one episode: a tree, in which every generation goes on from what an earlier one said.

        ┌ given ─ sampled ┬ given ─ sampled ─ given ─ sampled     one row of tokens for each leaf
    ────┤                 └ given ─ sampled
        └ given ─ sampled                                         a history that goes on from nothing sampled: a fork

Pure: no tokenizer, no network. Tokens enter as they were sampled and never change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from async_rl.types import Completion, Message, Sample
from rollout_workers.chat.token_row import TokenRow

History = Sequence[object]
"""What a client repeats to go on: canonical messages after the tools, or text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlace:
    """Where a generation hangs, found before it is sampled."""

    parent: SampledTurn | None
    given: tuple[int, ...]
    """What the model reads after the parent's row; without a parent, the whole prompt."""

    @property
    def prompt(self) -> list[int]:
        return [*(self.parent.row() if self.parent is not None else ()), *self.given]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledTurn:
    """One generation and its place."""

    place: TurnPlace
    completion: Completion
    conversation: tuple[Message, ...]
    """All of it, the answer included, for people to read."""
    history: History
    """What a client says to go on from here; empty where it speaks in token ids."""
    children: list[SampledTurn] = field(default_factory=list["SampledTurn"])

    def row(self) -> list[int]:
        """Every token up to the end of the answer."""
        return [token for turn in self.path() for token in turn.own_ids]

    @property
    def own_ids(self) -> list[int]:
        return [*self.place.given, *self.completion.token_ids.tolist()]

    def path(self) -> list[SampledTurn]:
        """From the root to this turn."""
        upwards: list[SampledTurn] = [self]
        while (parent := upwards[-1].place.parent) is not None:
            upwards.append(parent)
        return upwards[::-1]


class TurnTree:
    def __init__(self) -> None:
        self.turns: list[SampledTurn] = []
        """In the order in which they were sampled."""

    @property
    def forks(self) -> int:
        """Prompts beyond the first that went on from nothing sampled. To ask the same again is no fork."""
        return max(0, len({turn.place for turn in self.turns if turn.place.parent is None}) - 1)

    def find_history(self, history: History) -> SampledTurn | None:
        """The turn that `history` repeats furthest; the newest where several say the same."""
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
        """Where a prompt of tokens belongs: below the row that it begins with."""
        parent = self.find_tokens(token_ids)
        return TurnPlace(parent=parent, given=tuple(token_ids[len(parent.row()) if parent is not None else 0 :]))

    def add(
        self, place: TurnPlace, completion: Completion, *, conversation: tuple[Message, ...], history: History
    ) -> SampledTurn:
        turn = SampledTurn(place=place, completion=completion, conversation=conversation, history=history)
        self.turns.append(turn)
        if place.parent is not None:
            place.parent.children.append(turn)
        return turn

    def samples(self) -> tuple[Sample, ...]:
        """A row for each leaf. A sampled token that several of them share is trained in the first, and read in the others."""
        trained: set[int] = set()
        rows: list[Sample] = []
        for leaf in self._leaves():
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

    def _leaves(self) -> Iterator[SampledTurn]:
        return (turn for turn in self.turns if not turn.children)
