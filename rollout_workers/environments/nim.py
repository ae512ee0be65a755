"""Nim: a heap of stones, take one to three of them; taking the last one wins. A move is one digit."""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.protocols import GenerationArgs
from async_rl.types import Task
from rollout_workers.agents.games import Game, GameAgent, HeadToHeadAgent, SelfPlayAgent

MOST = 3


class Nim:
    """Two seats. `nim7=` → `2` → (the other takes 1) → `4=` → ...; the winner earns 1 and the loser -1."""

    seats = 2

    def __init__(self, stones: int) -> None:
        self._stones = stones
        self._moves = 0

    @property
    def seat(self) -> int:
        return self._moves % self.seats

    @property
    def is_over(self) -> bool:
        return self._stones == 0

    def observe(self) -> str:
        has_moved = self._moves >= self.seats
        return f"{self._stones}=" if has_moved else f"nim{self._stones}="

    def is_legal(self, move: str) -> bool:
        return move in "123" and len(move) == 1 and int(move) <= self._stones

    def act(self, move: str) -> None:
        self._stones -= int(move)
        self._moves += 1

    def returns(self) -> list[float]:
        loser = self.seat  # no stone is left for the seat to move
        return [-1.0 if seat == loser else 1.0 for seat in range(self.seats)]


@dataclass(kw_only=True)
class NimAgent(GameAgent):
    highest: int = 9

    def task(self, index: int) -> Task:
        stones = self.random(index).randint(MOST + 1, self.highest)
        return self.new_task(index, Nim(stones).observe(), stones=stones)

    def game(self, task: Task) -> Game:
        return Nim(int(task.data["stones"]))

    def generation_args(self, task: Task) -> GenerationArgs:
        return GenerationArgs(max_tokens=1)


@dataclass(kw_only=True)
class NimHeadToHead(NimAgent, HeadToHeadAgent):
    """Against one of the configured policies, or against itself."""


@dataclass(kw_only=True)
class NimSelfPlay(NimAgent, SelfPlayAgent):
    """Both seats are trained."""
