"""Measure another agent while its groups are played: pass@k over the samples of a task, and one greedy answer.

sibling 0: temperature 0        siblings 1 ..: samples        all of them carry pass@k and greedy among their metrics
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from async_rl.protocols import Agent, EpisodeContext, FiniteAgent, GenerationArgs, InferenceInterface
from async_rl.telemetry.estimates import Estimate, estimate_share, pass_at_k
from async_rl.types import Rollout, Status, Task, Ticket
from rollout_workers.agents.siblings import play_siblings
from rollout_workers.inference.evaluation_inference import EvaluationInference

GREEDY = GenerationArgs(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAtEvaluationAgent:
    """Plays the tasks of `agent`. The greedy answer is masked, because it was not sampled from the policy."""

    agent: Agent
    k: Sequence[int] = (1,)
    solved_at: float = 1.0
    """An answer counts as right from this reward on."""

    @property
    def num_tasks(self) -> int | None:
        return self.agent.num_tasks if isinstance(self.agent, FiniteAgent) else None

    def task(self, index: int) -> Task:
        return self.agent.task(index)

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        """Play one sample with `agent`."""
        return await self.agent.rollout(task, inference, context)

    async def rollout_group(
        self, task: Task, inference: InferenceInterface, contexts: Sequence[EpisodeContext]
    ) -> Sequence[Rollout]:
        if len(contexts) <= max(self.k):
            raise ValueError(f"pass@{max(self.k)} and a greedy answer need a group of {max(self.k) + 1}, got {len(contexts)}")
        greedy_inference = EvaluationInference(inference, always=GREEDY)

        async def roll(task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
            is_greedy = context.sibling == contexts[0].sibling
            return await self.agent.rollout(task, greedy_inference if is_greedy else inference, context)

        greedy, *samples = await play_siblings(roll, task, inference, contexts)
        measured = self._measured(greedy, samples)
        if greedy.status is not Status.FAILED:
            greedy = replace(greedy, status=Status.MASKED)
        return [replace(rollout, metrics={**rollout.metrics, **measured}) for rollout in (greedy, *samples)]

    async def evaluate(
        self, indexes: Sequence[int], inference: InferenceInterface, *, samples: int, at_once: int = 32
    ) -> dict[str, Estimate]:
        """Evaluate tasks, each with a greedy answer and `samples` samples. Measures without any value are absent."""
        places = asyncio.Semaphore(at_once)

        async def measured(index: int) -> Rollout:
            async with places:
                ticket = Ticket(id=f"pass-at-{index}", task_index=index, version=0, attempt=1)
                contexts = [
                    EpisodeContext(ticket=ticket, sibling=sibling, seed=(index << 16) + sibling)
                    for sibling in range(samples + 1)
                ]
                return (await self.rollout_group(self.task(index), inference, contexts))[0]

        async with asyncio.TaskGroup() as tasks:
            playing = [tasks.create_task(measured(index)) for index in indexes]
        found = [task.result().metrics for task in playing]
        names = ["greedy", *(f"pass@{k}" for k in self.k)]
        values = {name: [metrics[name] for metrics in found if name in metrics] for name in names}
        return {name: estimate_share(shares) for name, shares in values.items() if shares}

    def _measured(self, greedy: Rollout, samples: Sequence[Rollout]) -> dict[str, float]:
        """Measures of one task. Failed samples count as neither right nor wrong; pass@k needs k others."""
        scored = [rollout for rollout in samples if rollout.status is not Status.FAILED]
        right = sum(self._is_right(rollout) for rollout in scored)
        measured = {f"pass@{k}": pass_at_k(len(scored), right, k) for k in self.k if k <= len(scored)}
        if greedy.status is not Status.FAILED:
            measured["greedy"] = float(self._is_right(greedy))
        return measured

    def _is_right(self, rollout: Rollout) -> bool:
        return rollout.reward >= self.solved_at
