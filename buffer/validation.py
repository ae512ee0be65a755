"""Pure: is a group fit to be trained on? Each check answers with the first problem it finds, or None."""

from __future__ import annotations

import math

import numpy as np

from async_rl.types import Rollout, RolloutGroup, Sample, Status

LOGPROB_SLACK = 1e-5
"""A float32 log-softmax of a certain token may come out this far above 0."""


def problem_with(group: RolloutGroup) -> str | None:
    """What a group must satisfy wherever it is: when a worker commits it and when the learner reads it."""
    trainable = 0
    for index, rollout in enumerate(group.rollouts):
        if problem := _problem_with_rollout(rollout):
            return f"rollout {index}: {problem}"
        trainable += rollout.num_sampled
    return None if trainable else "no token of the group was sampled"


def problem_with_versions(*, oldest: int, newest: int, ticket_version: int, live_version: int) -> str | None:
    """What only the buffer can judge. `scripts/commit.lua` says the same."""
    if oldest < ticket_version:
        return f"its oldest token is of version {oldest}, before its ticket's version {ticket_version}"
    if newest > live_version:
        return f"its newest token is of version {newest}, above the live version {live_version}"
    return None


def _problem_with_rollout(rollout: Rollout) -> str | None:
    if rollout.status is not Status.FAILED and not math.isfinite(rollout.reward):
        return f"the reward is {rollout.reward}"
    for index, sample in enumerate(rollout.samples):
        if problem := _problem_with_sample(sample):
            return f"sample {index}: {problem}"
    return None


def _problem_with_sample(sample: Sample) -> str | None:
    length = len(sample.token_ids)
    if len(sample.loss_mask) != length or len(sample.logprobs) != length:
        return f"{length} token ids, {len(sample.loss_mask)} mask entries and {len(sample.logprobs)} logprobs"
    if length == 0:
        return "it is empty"
    if sample.token_ids.min() < 0:
        return "a token id is negative"
    if sample.loss_mask.max() > 1:
        return "the mask holds something else than 0 and 1"
    if not np.isfinite(sample.logprobs).all():
        return "a logprob is not finite"
    if sample.logprobs.max() > LOGPROB_SLACK:
        return "a logprob is above 0"
    if np.any(sample.logprobs[sample.loss_mask == 0]):
        return "a token that was not sampled has a logprob"
    return _problem_with_spans(sample)


def _problem_with_spans(sample: Sample) -> str | None:
    covered = np.zeros(len(sample), np.uint8)
    end = 0
    for span in sample.versions:
        if not end <= span.start < span.stop <= len(sample):
            return f"the version span [{span.start}, {span.stop}) is out of place"
        if span.version < 0:
            return f"a token is said to be of version {span.version}"
        covered[span.start : span.stop] = 1
        end = span.stop
    if not np.array_equal(covered, sample.loss_mask):
        return "the version spans do not cover exactly the sampled tokens"
    return None
