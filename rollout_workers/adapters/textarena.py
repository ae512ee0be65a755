"""Games of TextArena: one seat is trained against an opponent, or all of them against each other."""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from async_rl.errors import ConfigError
from async_rl.types import Message, Task
from rollout_workers.adapters.import_optional import import_optional
from rollout_workers.agents.games import GameAgent, HeadToHeadAgent, SelfPlayAgent

_CHANCE = Lock()
"""Held while a game uses Python's global random state: tasks are posed on threads."""


class TextArenaGame:
    """One game. Illegal moves are left to it: it warns, and then ends with a penalty."""

    def __init__(self, library: Any, id: str, players: int, seed: int, options: Mapping[str, Any]) -> None:
        self._library = library
        self._chance = random.Random(seed).getstate()
        self._rewards: Mapping[int, float] = {}
        self.seats = players
        self.is_over = False
        with self._own_chance():
            self._moves = library.make(id, **options)  # its wrappers convert moves
            self._moves.reset(num_players=players, seed=seed)
        self._game = self._moves
        while isinstance(self._game, library.Wrapper):  # observations of the wrappers repeat the whole history
            self._game = self._game.env

    @property
    def seat(self) -> int:
        return self._game.state.current_player_id

    def observe(self) -> tuple[Message, ...]:
        """What happened since this seat's last move, and the latest board."""
        seat, observations = self._game.get_observation()
        board = self._library.ObservationType.GAME_BOARD
        boards = [place for place, (_, _, kind) in enumerate(observations) if kind is board]
        lines = [
            f"[Player {sender}] {text}" if sender != self._library.GAME_ID else text
            for place, (sender, text, kind) in enumerate(observations)
            if sender != seat and (kind is not board or place == boards[-1])
        ]
        return (Message(role="user", content="\n".join(lines)),)

    def is_legal(self, move: str) -> bool:
        return True

    def act(self, move: str) -> None:
        with self._own_chance():
            self.is_over, _ = self._moves.step(move)
            if self.is_over:
                self._rewards, _ = self._moves.close()

    def returns(self) -> Sequence[float]:
        return [float(self._rewards[seat]) for seat in range(self.seats)]

    @contextmanager
    def _own_chance(self) -> Generator[None]:
        """Give the game its own random state: TextArena uses that of the process, which concurrent games would share."""
        with _CHANCE:
            outside = random.getstate()
            random.setstate(self._chance)
            try:
                yield
            finally:
                self._chance = random.getstate()
                random.setstate(outside)


@dataclass(kw_only=True)
class TextArenaAgent(GameAgent):
    id: str
    """`TicTacToe-v0`, `KuhnPoker-v0`, ..."""
    players: int = 2
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the game: max_turns, num_rounds, ..."""

    def __post_init__(self) -> None:
        self._library = import_optional("textarena", install="async-rl[envs]")
        try:
            self._play(0).observe()
        except Exception as error:
            raise ConfigError(
                f"environment {self.name!r}: TextArena cannot begin {self.id!r} with {self.players} players: {error}"
            ) from error

    def task(self, index: int) -> Task:
        seed = self.random(index).getrandbits(31)
        return self.new_task(index, self._play(seed).observe(), seed=seed)

    def game(self, task: Task) -> TextArenaGame:
        return self._play(int(task.data["seed"]))

    def _play(self, seed: int) -> TextArenaGame:
        return TextArenaGame(self._library, self.id, self.players, seed, self.options)


@dataclass(kw_only=True)
class TextArena(TextArenaAgent, HeadToHeadAgent):
    """Play against one of `policies`, or the model itself. A game of one player has no opponent."""


@dataclass(kw_only=True)
class TextArenaSelfPlay(TextArenaAgent, SelfPlayAgent):
    """Train all seats."""
