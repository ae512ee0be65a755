"""Nim: a heap of stones, take one to three of them; taking the last one wins. A move is one digit, or ends a chat answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from async_rl.protocols import GenerationArgs
from async_rl.types import Message, Task
from rollout_workers.agents.games import Game, GameAgent, HeadToHeadAgent, SelfPlayAgent

MOST = 3
RULES = (
    "We play Nim. There are {stones} stones. In turn each of us takes 1, 2 or 3 of them, and who takes the last stone wins. "
    "It is your move. End your answer with the number of stones that you take."
)


class Nim:
    """Two seats. `nim7=` → `2` → (the other takes 1) → `4=` → ...; the winner earns 1 and the loser -1."""

    seats = 2

    def __init__(self, stones: int, *, in_words: bool = False) -> None:
        """`in_words`: explain the rules in a user message, and read the last number of an answer."""
        self._stones = stones
        self._in_words = in_words
        self._moves = 0

    @property
    def seat(self) -> int:
        return self._moves % self.seats

    @property
    def is_over(self) -> bool:
        return self._stones == 0

    def observe(self) -> str | tuple[Message, ...]:
        has_moved = self._moves >= self.seats
        if self._in_words:
            said = f"{self._stones} stones are left. It is your move." if has_moved else RULES.format(stones=self._stones)
            return (Message(role="user", content=said),)
        return f"{self._stones}=" if has_moved else f"nim{self._stones}="

    def is_legal(self, move: str) -> bool:
        return 1 <= self._taken(move) <= min(MOST, self._stones)

    def act(self, move: str) -> None:
        self._stones -= self._taken(move)
        self._moves += 1

    def _taken(self, move: str) -> int:
        """The stones that a move takes; 0 if it names none."""
        if not self._in_words:
            return int(move) if move in ("1", "2", "3") else 0
        numbers: list[str] = re.findall(r"(?<![\d.])\d{1,3}(?!\d)", move)
        return int(numbers[-1]) if numbers else 0

    def returns(self) -> list[float]:
        loser = self.seat  # no stone is left for the seat to move
        return [-1.0 if seat == loser else 1.0 for seat in range(self.seats)]


@dataclass(kw_only=True)
class NimAgent(GameAgent):
    highest: int = 9
    """The largest heap."""
    chat: bool = False
    """Explain the rules in a message, for a chat model, which may think before it names its move."""

    def task(self, index: int) -> Task:
        stones = self.random(index).randint(MOST + 1, self.highest)
        return self.new_task(index, Nim(stones, in_words=self.chat).observe(), stones=stones)

    def game(self, task: Task) -> Game:
        return Nim(int(task.data["stones"]), in_words=self.chat)

    def generation_args(self, task: Task) -> GenerationArgs:
        return GenerationArgs() if self.chat else GenerationArgs(max_tokens=1)


@dataclass(kw_only=True)
class NimHeadToHead(NimAgent, HeadToHeadAgent):
    """Against one of the configured policies, or against itself."""


@dataclass(kw_only=True)
class NimSelfPlay(NimAgent, SelfPlayAgent):
    """Both seats are trained."""
