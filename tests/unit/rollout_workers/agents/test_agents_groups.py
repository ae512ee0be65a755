"""Agents that look at all siblings of a task: rewards that compare, pairs of chosen and rejected, pass@k."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from async_rl.protocols import EpisodeContext, GenerationArgs, GroupAgent, InferenceInterface
from async_rl.testing import DIGITS_AND_LETTERS, ScriptedInference
from async_rl.tokenization.tokenizers import Characters
from async_rl.types import Completion, Rollout, Status, Task, Ticket
from rollout_workers.agents import (
    BestAndWorstAgent,
    GroupRewardAgent,
    PassAtEvaluationAgent,
    RewardOnlyAgent,
    Score,
    TwoPromptsAgent,
)
from rollout_workers.agents.group_reward import ranked
from rollout_workers.episodes.rewards import RewardFailed

TICKET = Ticket(id="t0", task_index=0, version=0, attempt=1)


def contexts(count: int) -> list[EpisodeContext]:
    return [EpisodeContext(ticket=TICKET, sibling=sibling, seed=sibling) for sibling in range(count)]


def saying(*answers: str) -> ScriptedInference:
    """One after the other; the siblings of a group ask in their order."""
    left = iter(answers)
    return ScriptedInference(lambda text: next(left))


class Number(RewardOnlyAgent):
    """Worth the number that is said; anything else breaks the episode."""

    def task(self, index: int) -> Task:
        return self.new_task(index, "a=")

    async def get_observation(self, task: Task, turns: Sequence[object]) -> str | None:
        return None

    def reward(self, task: Task, response: str) -> float:
        return float(response)


class Ranked(Number, GroupRewardAgent):
    def group_reward(self, task: Task, rollouts: Sequence[Rollout], context: EpisodeContext) -> list[float]:
        return ranked([rollout.reward for rollout in rollouts])


async def played(agent: GroupAgent, inference: InferenceInterface, siblings: int) -> Sequence[Rollout]:
    return await agent.rollout_group(agent.task(0), inference, contexts(siblings))


# -- rewards that compare ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "ranks"),
    [([3, 1, 2], [1, 0, 0.5]), ([1, 1], [0.5, 0.5]), ([5, 0, 5, 0, 9], [0.625, 0.125, 0.625, 0.125, 1]), ([7], [0]), ([], [])],
)
def test_ranks_are_spaced_evenly_and_ties_are_shared(values: list[float], ranks: list[float]):
    assert ranked(values) == pytest.approx(ranks)


async def test_a_group_is_scored_by_comparing_its_siblings():
    rollouts = await played(Ranked(name="ranked"), saying("3", "10", "7"), 3)
    assert [rollout.reward for rollout in rollouts] == [0, 1, 0.5]
    assert {rollout.status for rollout in rollouts} == {Status.OK}


async def test_a_sibling_that_failed_is_left_out_of_the_comparison():
    rollouts = await played(Ranked(name="ranked"), saying("3", "x", "7"), 3)
    assert [rollout.status for rollout in rollouts] == [Status.OK, Status.FAILED, Status.OK]
    assert [rollouts[0].reward, rollouts[2].reward] == [0, 1]
    assert rollouts[1].failure is not None
    assert (rollouts[1].failure.boundary, rollouts[1].failure.kind) == ("reward", "ValueError")


class Prepared(Number, GroupRewardAgent):
    """Says what it was told to say."""

    scores: Sequence[float | Score] = ()

    def group_reward(self, task: Task, rollouts: Sequence[Rollout], context: EpisodeContext) -> Sequence[float | Score]:
        return self.scores


async def test_a_score_of_the_group_brings_its_parts():
    agent = Prepared(name="prepared")
    agent.scores = [Score(reward=2, parts={"style": 1}), 0.5]
    first, second = await played(agent, saying("1", "2"), 2)
    assert (first.reward, first.reward_parts, second.reward) == (2, {"style": 1}, 0.5)


@pytest.mark.parametrize(("scores", "reason"), [([1.0], "1 rewards for 2"), ([1.0, float("nan")], "finite number")])
async def test_nonsense_about_a_group_fails_the_group(scores: list[float], reason: str):
    agent = Prepared(name="prepared")
    agent.scores = scores
    with pytest.raises(RewardFailed) as raised:
        await played(agent, saying("1", "2"), 2)
    assert reason in str(raised.value.__cause__)


class Judged(Number, GroupRewardAgent):
    """Another model says which answer is the best."""

    async def group_reward(self, task: Task, rollouts: Sequence[Rollout], context: EpisodeContext) -> list[float]:
        said = " ".join(rollout.conversation[-1].content for rollout in rollouts)
        verdict = await context.policies["judge"].generate(f"best of {said}=")
        return [float(place == int(verdict.text)) for place in range(len(rollouts))]


async def test_a_judge_sees_all_answers_at_once():
    judge = ScriptedInference(lambda text: "1" if text == "best of 3 10 7=" else "0")
    judge.tokenizer = Characters(DIGITS_AND_LETTERS + " ")
    agent = Judged(name="judged")
    with_judge = [replace(context, policies={"judge": judge}) for context in contexts(3)]
    rollouts = await agent.rollout_group(agent.task(0), saying("3", "10", "7"), with_judge)
    assert [rollout.reward for rollout in rollouts] == [0, 1, 0]


async def test_alone_an_episode_is_a_group_of_one():
    agent = Ranked(name="ranked")
    assert (await agent.rollout(agent.task(0), saying("3"), contexts(1)[0])).reward == 0


# -- chosen and rejected ----------------------------------------------------------------------------------------------
class BestOf(Number, BestAndWorstAgent):
    pass


def marks(rollouts: Sequence[Rollout]) -> list[tuple[float, float, float]]:
    return [(rollout.metrics["pair"], rollout.metrics["chosen"], rollout.reward) for rollout in rollouts]


async def test_the_best_and_the_worst_of_the_candidates_make_a_pair():
    rollouts = await played(BestOf(name="best", candidates=3), saying("3", "8", "5", "2", "1", "9"), 4)
    assert marks(rollouts) == [(0, 1, 8), (0, 0, 3), (1, 1, 9), (1, 0, 1)]
    assert [rollout.conversation[-1].content for rollout in rollouts] == ["8", "3", "9", "1"]


async def test_a_pair_without_a_preference_is_masked():
    rollouts = await played(BestOf(name="best", candidates=2), saying("4", "4", "1", "2"), 4)
    assert [rollout.status for rollout in rollouts] == [Status.MASKED, Status.MASKED, Status.OK, Status.OK]


async def test_a_pair_needs_two_candidates_that_did_not_fail():
    rollouts = await played(BestOf(name="best", candidates=3), saying("x", "4", "x", "1", "x", "2"), 4)
    assert [rollout.status for rollout in rollouts] == [Status.FAILED, Status.FAILED, Status.OK, Status.OK]
    assert marks(rollouts[2:]) == [(1, 1, 2), (1, 0, 1)]


async def test_pairs_need_an_even_group():
    with pytest.raises(ValueError, match=r"even batch\.group_size, got 3"):
        await played(BestOf(name="best"), saying(), 3)
    with pytest.raises(ValueError, match="at least 2"):
        BestOf(name="best", candidates=1)


class Hinted(TwoPromptsAgent):
    def task(self, index: int) -> Task:
        return self.new_task(index, f"{index}+1=")

    def chosen(self, task: Task) -> str:
        return f"think {task.prompt}"

    def rejected(self, task: Task) -> str:
        return str(task.prompt)


async def test_two_prompts_make_a_pair_of_every_two_siblings():
    agent, inference = Hinted(name="hinted"), ScriptedInference(lambda text: "2" if "think" in text else "3")
    rollouts = [await agent.rollout(agent.task(1), inference, context) for context in contexts(4)]
    assert marks(rollouts) == [(0, 1, 1), (0, 0, 0), (1, 1, 1), (1, 0, 0)]
    assert [rollout.conversation[0].content for rollout in rollouts[:2]] == ["think 1+1=", "1+1="]


# -- pass@k -----------------------------------------------------------------------------------------------------------
class Temperatures(ScriptedInference):
    """Remembers how it was asked to sample."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        super().__init__(answer)
        self.asked: list[float | None] = []

    async def generate(self, prompt: Sequence[int], args: GenerationArgs | None = None) -> Completion:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.asked.append(args.temperature if args is not None else None)
        return await super().generate(prompt, args)


async def test_a_group_carries_its_pass_at_k_and_one_greedy_answer():
    left = iter("0110")
    inference = Temperatures(lambda text: next(left))
    agent = PassAtEvaluationAgent(agent=Number(name="number"), k=(1, 2))
    rollouts = await played(agent, inference, 4)
    assert inference.asked == [0.0, None, None, None]
    assert [rollout.status for rollout in rollouts] == [Status.MASKED, Status.OK, Status.OK, Status.OK]
    for rollout in rollouts:
        measured = {name: rollout.metrics[name] for name in ("greedy", "pass@1", "pass@2")}
        assert measured == pytest.approx({"greedy": 0, "pass@1": 2 / 3, "pass@2": 1})


async def test_failed_samples_count_as_neither_right_nor_wrong():
    agent = PassAtEvaluationAgent(agent=Number(name="number"), k=(1, 2))
    rollouts = await played(agent, saying("x", "1", "x", "x"), 4)
    assert rollouts[0].status is Status.FAILED
    assert rollouts[1].metrics["pass@1"] == 1
    assert {"pass@2", "greedy"}.isdisjoint(rollouts[1].metrics)


async def test_a_group_too_small_for_k_is_refused():
    agent = PassAtEvaluationAgent(agent=Number(name="number"), k=(1, 4))
    with pytest.raises(ValueError, match="need a group of 5, got 4"):
        await played(agent, saying(), 4)


async def test_many_tasks_give_an_estimate():
    answers = itertools.cycle(["1", "0", "1"])
    agent = PassAtEvaluationAgent(agent=Number(name="number"), k=(1, 2))
    found = await agent.evaluate(range(5), ScriptedInference(lambda text: next(answers)), samples=2, at_once=1)
    assert {name: estimate.mean for name, estimate in found.items()} == {"greedy": 1, "pass@1": 0.5, "pass@2": 1}
    assert {estimate.tasks for estimate in found.values()} == {5}
