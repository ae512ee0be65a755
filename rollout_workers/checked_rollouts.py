"""What comes out of an episode, checked: refused here is what the buffer would quarantine together with healthy siblings."""

from __future__ import annotations

import math

import numpy as np

from async_rl.types import Failure, Rollout, Sample, Status


def failed(failure: Failure) -> Rollout:
    return Rollout(samples=(), reward=0.0, status=Status.FAILED, failure=failure)


def nonsense(boundary: str, message: str) -> Failure:
    return Failure(boundary=boundary, kind="Nonsense", message=message)


def checked(rollout: object) -> Rollout:
    """The rollout, if it is one and its numbers fit together; else a failed one that says what is wrong."""
    if not isinstance(rollout, Rollout):
        return failed(nonsense("environment", f"rollout() must return a Rollout, got {type(rollout).__name__}"))
    if rollout.status is Status.FAILED:
        return failed(rollout.failure if rollout.failure is not None else nonsense("environment", "failed without a reason"))
    if not math.isfinite(rollout.reward):
        return failed(nonsense("reward", f"the reward must be a finite number, got {rollout.reward!r}"))
    for sample in rollout.samples:
        if (problem := _problem_of(sample)) is not None:
            return failed(nonsense("environment", problem))
    return rollout


def trainable(rollout: Rollout) -> Rollout:
    """The rollout, if it holds what a learner needs. One that is only evaluated, or masked, needs no samples."""
    if rollout.status in (Status.FAILED, Status.MASKED) or rollout.num_sampled:
        return rollout
    return failed(
        nonsense(
            "environment",
            "the rollout holds no sampled token: a backend that returns no token ids, logprobs and versions "
            "can be evaluated, but not trained",
        )
    )


def _problem_of(sample: Sample) -> str | None:
    length = len(sample)
    if len(sample.loss_mask) != length or len(sample.logprobs) != length:
        return f"a row of {length} tokens has {len(sample.loss_mask)} mask entries and {len(sample.logprobs)} logprobs"
    if not np.isfinite(sample.logprobs).all():
        return "a row has a logprob that is not a finite number"
    if np.any(sample.logprobs[sample.loss_mask == 0]):
        return "a row has a logprob where nothing was sampled"
    covered = np.zeros(length, np.uint8)
    for span in sample.versions:
        if not 0 <= span.start < span.stop <= length:
            return f"the version span [{span.start}, {span.stop}) lies outside its row of {length} tokens"
        covered[span.start : span.stop] += 1
    if not np.array_equal(covered, sample.loss_mask):
        return "the version spans of a row do not cover exactly its sampled tokens"
    return None
