"""Games of several seats: head-to-head with one trained seat, or self-play with all seats trained.

game.observe ─▶ dialogue of the seat to move ─▶ its answer is the move ─▶ game.act ─▶ next seat ─▶ ... ─▶ game.returns
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from async_rl.protocols import EpisodeContext, InferenceInterface
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


@dataclass(kw_only=True)
class GameAgent(TaskStream):
    """Base of HeadToHeadAgent and SelfPlayAgent. Subclass one of those with `task` and `game`."""

    forfeit: float = -1.0
    """Reward of a seat that answers with an illegal move or whose context is full. The game ends, the others earn 0."""

    @abstractmethod
    def game(self, task: Task) -> Game:
        """Return a new game of the task."""

    async def play(self, task: Task, game: Game, models: Sequence[InferenceInterface]) -> list[Rollout]:
        """Play to the end with one model per seat. Returns one rollout for each."""
        dialogues = [Dialogue(model) for model in models]
        earned = await self._earned(task, game, dialogues)
        return [_rollout(seat, *played) for seat, played in enumerate(zip(dialogues, earned, strict=True))]

    async def _earned(self, task: Task, game: Game, dialogues: Sequence[Dialogue]) -> Sequence[float]:
        while not game.is_over:
            seat = game.seat
            dialogues[seat].observe(game.observe())
            answer = await dialogues[seat].next_answer(self.generation_args(task))
            if answer is None or not game.is_legal(move := answer.text.strip()):
                return [self.forfeit if other == seat else 0.0 for other in range(game.seats)]
            game.act(move)
        return game.returns()


def _rollout(seat: int, dialogue: Dialogue, reward: float) -> Rollout:
    """The rollout of a seat. A seat that never moved is masked: it counts for the baseline only."""
    if not dialogue.num_turns:
        return Rollout(samples=(), reward=reward, status=Status.MASKED, metrics={"seat": seat, "turns": 0})
    return dialogue.rollout(Score(reward=reward), seat=seat)


@dataclass(kw_only=True)
class HeadToHeadAgent(GameAgent):
    """Train one seat; another model plays the others. Siblings take the seats in turn."""

    opponent: str = ""
    """A name under `policies`; unset means the trained model itself with its current weights."""

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        game, opponent = self.game(task), self._opponent(inference, context)
        trained = context.sibling % game.seats
        models = [inference if seat == trained else opponent for seat in range(game.seats)]
        return (await self.play(task, game, models))[trained]

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

        firsts = await play_siblings(play_table, task, inference, hosts)
        played = (tables.get(host.sibling, [failed] * seats) for host, failed in zip(hosts, firsts, strict=True))
        return [rollout for table in played for rollout in table]

    async def _table(self, task: Task, inference: InferenceInterface) -> list[Rollout]:
        game = self.game(task)
        return await self.play(task, game, [inference] * game.seats)
