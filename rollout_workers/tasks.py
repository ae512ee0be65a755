"""Which task a ticket stands for: one number becomes an environment and its next task, the same in every worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from async_rl.protocols import Agent
from async_rl.rollout_config import EnvironmentConfig
from async_rl.types import Task
from rollout_workers.registry import build_agent

PERIOD = 5040
"""Tasks after which the order of the environments repeats. Divisible by 1 to 10, so that everyday ratios come out exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedAgent:
    agent: Agent
    weight: float


class TaskMix:
    """Deals task indexes out to the environments by weight. Pure: nothing is remembered between calls.

    Each environment sees its own stream 0, 1, 2, ... without gaps, evenly spread over the whole.
    """

    def __init__(self, environments: Sequence[WeightedAgent]) -> None:
        self._agents = [environment.agent for environment in environments]
        self._shares = apportion([environment.weight for environment in environments], PERIOD)
        self._round = interleave(self._shares)

    @classmethod
    def from_config(cls, environments: Sequence[EnvironmentConfig], seed: int) -> TaskMix:
        return cls([WeightedAgent(agent=build_agent(section, seed), weight=section.weight) for section in environments])

    def draw(self, task_index: int) -> tuple[Agent, Task]:
        rounds, place = divmod(task_index, PERIOD)
        chosen, earlier = self._round[place]
        agent = self._agents[chosen]
        return agent, agent.task(rounds * self._shares[chosen] + earlier)


def apportion(weights: Sequence[float], places: int) -> list[int]:
    """Whole shares of `places` by largest remainder, at least one for everybody: a small weight is rare, not absent."""
    spare = places - len(weights)
    exact = [weight / sum(weights) * places for weight in weights]
    shares = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda who: shares[who] - exact[who])
    if spare < 0:
        raise ValueError(f"{len(weights)} environments do not fit into {places} places")
    while (missing := places - sum(shares)) > 0:
        for who in by_remainder[:missing]:
            shares[who] += 1
    while sum(shares) > places:  # only when shares were raised to one
        shares[max(range(len(shares)), key=shares.__getitem__)] -= 1
    return shares


def interleave(shares: Sequence[int]) -> list[tuple[int, int]]:
    """For each place: who has it, and how many places that one had before. Everybody's places are spread evenly."""
    wishes = [((turn + 0.5) / share, who, turn) for who, share in enumerate(shares) for turn in range(share)]
    return [(who, turn) for _, who, turn in sorted(wishes)]
