"""What each rollout of a step is worth: shaped rewards, who is compared with whom, who is trained on."""

from typing import Any

import numpy as np
import pytest

from async_rl.types import Failure, Rollout, RolloutGroup, Sample, Status, TakenGroup, Task
from learner.advantages.rollouts import RolloutCredit, assign_credit
from learner.objective import Objective


def rollout(reward: float, *, tokens: int = 4, status: Status = Status.OK) -> Rollout:
    """A prompt of one token, then `tokens` sampled ones."""
    sample = Sample(
        token_ids=np.zeros(tokens + 1, np.int32),
        loss_mask=np.array([0] + [1] * tokens, np.uint8),
        logprobs=np.zeros(tokens + 1, np.float32),
        versions=(),
    )
    failure = Failure(boundary="reward", kind="Broken", message="") if status is Status.FAILED else None
    return Rollout(samples=(sample,), reward=reward, status=status, failure=failure)


def worth(objective: dict[str, Any], *groups: list[Rollout]) -> RolloutCredit:
    taken = [
        TakenGroup(
            group=RolloutGroup(id="g", task=Task(key="t", environment="e", prompt="p"), rollouts=tuple(each), worker="w"),
            version_at_commit=0,
            version_at_take=0,
        )
        for each in groups
    ]
    return assign_credit(taken, Objective.model_validate({"advantages": {"scale": "none"}} | objective))


def test_failed_rollouts_are_out_and_masked_ones_only_in_the_baseline() -> None:
    found = worth(
        {},
        [rollout(1.0), rollout(4.0, status=Status.TRUNCATED), rollout(7.0, status=Status.MASKED)],
        [rollout(1.0), rollout(float("nan"), status=Status.FAILED), rollout(3.0)],
    )
    assert found.advantages.tolist() == [-3, 0, 3, -1, 0, 1]
    assert found.rewards.tolist() == [1, 4, 7, 1, 0, 3]
    assert found.is_trained.tolist() == [True, True, False, True, False, True]


def test_truncated_answers_can_stay_in_the_baseline_alone() -> None:
    found = worth({"rewards": {"train_truncated": False}}, [rollout(1.0), rollout(4.0, status=Status.TRUNCATED)])
    assert found.advantages.tolist() == [-1.5, 1.5]
    assert found.is_trained.tolist() == [True, False]


def test_long_answers_are_punished_before_siblings_are_compared() -> None:
    shaping = {"rewards": {"overlong": {"max_length": 8, "buffer": 4, "factor": 2.0}}}
    found = worth(shaping, [rollout(1.0, tokens=4), rollout(1.0, tokens=6), rollout(5.0, tokens=7, status=Status.FAILED)])
    assert found.rewards.tolist() == [1, 0, 0]
    assert found.advantages.tolist() == [0.5, -0.5, 0]


def test_a_baseline_can_go_by_length() -> None:
    found = worth(
        {"advantages": {"baseline": "length_weighted", "scale": "none"}}, [rollout(0.0, tokens=1), rollout(4.0, tokens=3)]
    )
    assert found.advantages.tolist() == [-3, 1]


def test_whitening_counts_the_tokens_that_are_trained() -> None:
    whitened = {"advantages": {"baseline": "none", "scale": "none", "whiten": True}}
    found = worth(
        whitened,
        [rollout(1.0, tokens=3), rollout(5.0, tokens=1)],
        [rollout(100.0, tokens=9, status=Status.MASKED)],
    )
    # the mean of 1 1 1 5 is 2, their variance 4
    assert found.advantages[:2] == pytest.approx([-0.5, 1.5])


def test_advantages_of_tokens_are_made_elsewhere() -> None:
    found = worth({"advantages": "gae", "value_loss": {}}, [rollout(1.0), rollout(4.0)])
    assert found.advantages.tolist() == [0, 0]
    assert found.rewards.tolist() == [1, 4]


def test_nothing_in_nothing_out() -> None:
    found = worth({})
    assert len(found.rewards) == len(found.advantages) == len(found.is_trained) == 0
