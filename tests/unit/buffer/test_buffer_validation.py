"""Validation of groups before training."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from async_rl.types import Rollout, RolloutGroup, Sample, Status, Task, VersionSpan
from buffer.payloads.validation import problem_with

SAMPLED = [0, 0, 1, 1, 0, 1]


def span(version: int, start: int, stop: int) -> VersionSpan:
    return VersionSpan(version=version, start=start, stop=stop)


SOUND = Sample(
    token_ids=np.array([5, 6, 7, 8, 9, 0], np.int32),
    loss_mask=np.array(SAMPLED, np.uint8),
    logprobs=np.array([0, 0, -1, 1e-6, -0.0, -0.5], np.float32),
    versions=(span(3, 2, 3), span(4, 3, 4), span(4, 5, 6)),
)


def group(*samples: Sample, reward: float = 1.0, status: Status = Status.OK) -> RolloutGroup:
    rollout = Rollout(samples=samples, reward=reward, status=status)
    return RolloutGroup(id="t", task=Task(key="k", environment="e", prompt="p"), rollouts=(rollout,), worker="w")


def changed(**fields: object) -> RolloutGroup:
    return group(SOUND, replace(SOUND, **fields))  # pyright: ignore[reportArgumentType]


def logprobs(position: int, value: float) -> np.ndarray:
    found = SOUND.logprobs.copy()
    found[position] = value
    return found


def test_a_sound_group_has_no_problem():
    assert problem_with(group(SOUND)) is None
    assert problem_with(group(SOUND), vocab_size=10) is None
    untrained = replace(SOUND, loss_mask=np.zeros(6, np.uint8), logprobs=np.zeros(6, np.float32), versions=())
    assert problem_with(group(untrained, SOUND)) is None


PROBLEMS = [
    (changed(token_ids=SOUND.token_ids[:5]), "5 token ids, 6 mask entries and 6 logprobs"),
    (changed(loss_mask=SOUND.loss_mask[:5]), "6 token ids, 5 mask entries"),
    (changed(logprobs=np.zeros((6, 2), np.float32)), "6 logprobs"),
    (changed(token_ids=SOUND.token_ids.astype(np.int64)), "int64"),
    (changed(loss_mask=SOUND.loss_mask.astype(np.bool_)), "bool"),
    (changed(logprobs=SOUND.logprobs.astype(np.float16)), "float16"),
    (
        group(Sample(**{name: getattr(SOUND, name)[:0] for name in ("token_ids", "loss_mask", "logprobs")}, versions=())),
        "empty",
    ),
    (changed(token_ids=np.array([5, 6, 7, -1, 9, 0], np.int32)), "a token id is negative"),
    (changed(token_ids=np.array([5, 6, 7, -(2**31), 9, 0], np.int32)), "a token id is negative"),
    (changed(token_ids=np.array([5, 6, 7, 10, 9, 0], np.int32)), "token id 10 is outside the vocabulary of 10"),
    (changed(loss_mask=np.array([0, 0, 1, 2, 0, 1], np.uint8)), "other than 0 and 1"),
    (changed(logprobs=logprobs(2, math.nan)), "not finite"),
    (changed(logprobs=logprobs(0, math.nan)), "not finite"),
    (changed(logprobs=logprobs(2, -math.inf)), "not finite"),
    (changed(logprobs=logprobs(2, math.inf)), "not finite"),
    (changed(logprobs=logprobs(2, 1e-4)), "above 0"),
    (changed(logprobs=logprobs(1, -0.5)), "not sampled has a logprob"),
    (changed(logprobs=logprobs(4, -1e-30)), "not sampled has a logprob"),
    (changed(versions=SOUND.versions[:2]), "do not cover exactly"),
    (changed(versions=(span(3, 1, 4), span(4, 5, 6))), "do not cover exactly"),
    (changed(versions=(span(-1, 2, 4), span(4, 5, 6))), "version -1"),
    (changed(versions=(span(3, 2, 7),)), r"\[2, 7\) is out of place"),
    (changed(versions=(span(3, 2, 2),)), "out of place"),
    (changed(versions=(span(3, -1, 2),)), "out of place"),
    (changed(versions=(span(3, 5, 6), span(3, 2, 4))), "out of place"),
    (changed(versions=(span(3, 2, 4), span(3, 3, 6))), "out of place"),
    (changed(versions=(span(3, 2**70, 2**71),)), "out of place"),
    (group(SOUND, reward=math.nan), "reward is nan"),
    (group(status=Status.FAILED), "no token of the group was sampled"),
]


@pytest.mark.parametrize(("bad", "said"), PROBLEMS, ids=[f"{n}-{said}" for n, (_, said) in enumerate(PROBLEMS)])
def test_a_problem_is_named(bad: RolloutGroup, said: str):
    with pytest.raises(ValueError, match=said):
        raise ValueError(problem_with(bad, vocab_size=10))


def test_the_problem_says_where_it_is():
    assert problem_with(changed(token_ids=SOUND.token_ids - 1)) == "rollout 0: sample 1: a token id is negative"


def test_the_reward_of_a_failed_rollout_means_nothing():
    assert problem_with(group(SOUND, reward=math.nan, status=Status.FAILED)) is None
