"""Games of several seats: head-to-head with one trained seat, or self-play with all seats trained.

game.observe ─▶ dialogue of the seat to move ─▶ its answer is the move ─▶ game.act ─▶ next seat ─▶ ... ─▶ game.returns
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from async_rl.protocols import EpisodeContext, GenerationArgs, InferenceInterface
from async_rl.types import Message, Rollout, Status, Task
from rollout_workers.agents.dialogue import Dialogue
from rollout_workers.agents.siblings import play_siblings
from rollout_workers.agents.task_stream import TaskStream
from rollout_workers.episodes.rewards import Score


class Game(Protocol):
    """The state of one game: whose turn it is, and at the end what every seat earned."""

    @property
    def seats(self) -> int: ...

    @property
    def seat(self) -> int:
        """Whose turn it is: 0 .. seats - 1."""
        ...

    @property
    def is_over(self) -> bool: ...

    def observe(self) -> str | tuple[Message, ...]:
        """What that seat reads before its move: first its prompt, later what followed its last move."""
        ...

    def is_legal(self, move: str) -> bool:
        """Return whether that seat may make this move. A move is the model's answer without surrounding spaces."""
        ...

    def act(self, move: str) -> None:
        """Make a legal move; the turn passes to the next seat."""
        ...

    def returns(self) -> Sequence[float]:
        """What each seat earned, once the game is over."""
        ...


class GamePlayer:
    """One seat: its model and its dialogue so far."""

    def __init__(self, inference: InferenceInterface) -> None:
        self._inference = inference
        self._dialogue: Dialogue | None = None

    async def move(self, observation: str | tuple[Message, ...], args: GenerationArgs) -> str | None:
        """Sample the next move; None when the context is full."""
        if self._dialogue is None:
            self._dialogue = Dialogue(self._inference, observation)
        else:
            self._dialogue.observe(observation)
        completion = await self._dialogue.next_answer(args)
        return completion.text.strip() if completion is not None else None

    def rollout(self, seat: int, reward: float) -> Rollout:
        """The rollout of this seat. A seat that never moved is masked: it counts for the baseline only."""
        if self._dialogue is None:
            return Rollout(samples=(), reward=reward, status=Status.MASKED, metrics={"seat": seat, "turns": 0})
        return self._dialogue.rollout(Score(reward=reward), seat=seat)


@dataclass(kw_only=True)
class GameAgent(TaskStream):
    """Base of HeadToHeadAgent and SelfPlayAgent. Subclass one of those with `task` and `game`."""

    forfeit: float = -1.0
    """Reward of a seat that answers with an illegal move or whose context is full. The game ends, the others earn 0."""

    @abstractmethod
    def game(self, task: Task) -> Game:
        """Return a new game of the task."""

    async def play(self, task: Task, game: Game, seats: Sequence[GamePlayer]) -> list[Rollout]:
        """Play to the end. Returns one rollout for each seat."""
        earned = await self._earned(task, game, seats)
        return [player.rollout(seat, reward) for seat, (player, reward) in enumerate(zip(seats, earned, strict=True))]

    async def _earned(self, task: Task, game: Game, seats: Sequence[GamePlayer]) -> Sequence[float]:
        while not game.is_over:
            seat = game.seat
            move = await seats[seat].move(game.observe(), self.generation_args(task))
            if move is None or not game.is_legal(move):
                return [self.forfeit if other == seat else 0.0 for other in range(game.seats)]
            game.act(move)
        return game.returns()


@dataclass(kw_only=True)
class HeadToHeadAgent(GameAgent):
    """Train one seat; another model plays the others. Siblings take the seats in turn."""

    opponent: str = ""
    """A name under `policies`; unset means the trained model itself with its current weights."""

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        game, opponent = self.game(task), self._opponent(inference, context)
        trained = context.sibling % game.seats
        seats = [GamePlayer(inference if seat == trained else opponent) for seat in range(game.seats)]
        return (await self.play(task, game, seats))[trained]

    def _opponent(self, inference: InferenceInterface, context: EpisodeContext) -> InferenceInterface:
        if not self.opponent:
            return inference
        if self.opponent not in context.policies:
            known = ", ".join(sorted(context.policies))
            raise ValueError(f"opponent {self.opponent!r} is not one of the configured policies ({known if known else 'none'})")
        return context.policies[self.opponent]


@dataclass(kw_only=True)
class SelfPlayAgent(GameAgent):
    """Train every seat on its own rollout and reward: a group of 8 is four games of two seats."""

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        """Play a game and return one seat's rollout; those of the others are dropped."""
        rollouts = await self._table(task, inference)
        return rollouts[context.sibling % len(rollouts)]

    async def rollout_group(
        self, task: Task, inference: InferenceInterface, contexts: Sequence[EpisodeContext]
    ) -> Sequence[Rollout]:
        seats = self.game(task).seats
        if len(contexts) % seats:
            raise ValueError(f"a game of {seats} seats needs a batch.group_size that is a multiple of it, got {len(contexts)}")
        hosts, tables = contexts[::seats], dict[int, list[Rollout]]()

        async def play_table(task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
            tables[context.sibling] = await self._table(task, inference)
            return tables[context.sibling][0]

        firsts = await play_siblings(self, play_table, task, inference, hosts)
        played = (tables.get(host.sibling, [failed] * seats) for host, failed in zip(hosts, firsts, strict=True))
        return [rollout for table in played for rollout in table]

    async def _table(self, task: Task, inference: InferenceInterface) -> list[Rollout]:
        game = self.game(task)
        return await self.play(task, game, [GamePlayer(inference) for _ in range(game.seats)])
