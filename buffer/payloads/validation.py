"""Pure: whether a group can be trained on. Each check returns the first problem it finds, or None."""

from __future__ import annotations

import math

import numpy as np

from async_rl.types import Rollout, RolloutGroup, Sample, Status

LOGPROB_SLACK = 1e-5
"""A float32 log-softmax of a certain token may come out this far above 0."""

_NEGATIVE = 2**31
"""A negative id, read as unsigned, is at least this; so one maximum finds ids that are too small or too large."""


def problem_with(group: RolloutGroup, *, vocab_size: int | None = None) -> str | None:
    """Check a group on its own; done when a worker commits it and when the learner reads it."""
    for index, rollout in enumerate(group.rollouts):
        if problem := _problem_with_rollout(rollout, vocab_size):
            return f"rollout {index}: {problem}"
    if not any(sample.versions for rollout in group.rollouts for sample in rollout.samples):
        return "no token of the group was sampled"
    return None


def _problem_with_rollout(rollout: Rollout, vocab_size: int | None) -> str | None:
    if rollout.status is not Status.FAILED and not math.isfinite(rollout.reward):
        return f"the reward is {rollout.reward}"
    for index, sample in enumerate(rollout.samples):
        # Each check relies on those before it, and a pass over an array costs about a microsecond, so there are few.
        problem = (
            _problem_with_shapes(sample)
            or _problem_with_token_ids(sample, vocab_size)
            or _problem_with_spans(sample)
            or _problem_with_logprobs(sample)
        )
        if problem:
            return f"sample {index}: {problem}"
    return None


def _problem_with_shapes(sample: Sample) -> str | None:
    ids, mask, logprobs = sample.token_ids, sample.loss_mask, sample.logprobs
    if ids.dtype != np.int32 or mask.dtype != np.uint8 or logprobs.dtype != np.float32:
        return f"ids, mask and logprobs are {ids.dtype}, {mask.dtype} and {logprobs.dtype} instead of int32, uint8 and float32"
    if not ids.shape == mask.shape == logprobs.shape == (len(ids),):
        return f"{len(ids)} token ids, {len(mask)} mask entries and {len(logprobs)} logprobs"
    return None if len(ids) else "it is empty"


def _problem_with_token_ids(sample: Sample, vocab_size: int | None) -> str | None:
    highest = int(np.maximum.reduce(sample.token_ids.view(np.uint32)))
    if highest >= _NEGATIVE:
        return "a token id is negative"
    if vocab_size is not None and highest >= vocab_size:
        return f"token id {highest} is outside the vocabulary of {vocab_size}"
    return None


def _problem_with_spans(sample: Sample) -> str | None:
    length, end = len(sample), 0
    covered = bytearray(length)
    for span in sample.versions:
        if not end <= span.start < span.stop <= length:
            return f"the version span [{span.start}, {span.stop}) is out of place"
        if span.version < 0:
            return f"a token has version {span.version}"
        covered[span.start : span.stop] = b"\1" * (span.stop - span.start)
        end = span.stop
    if bytes(covered) == sample.loss_mask.tobytes():
        return None
    if sample.loss_mask.max() > 1:
        return "the loss mask holds values other than 0 and 1"
    return "the version spans do not cover exactly the sampled tokens"


def _problem_with_logprobs(sample: Sample) -> str | None:
    lowest, highest = np.minimum.reduce(sample.logprobs), np.maximum.reduce(sample.logprobs)
    if not (lowest > -math.inf and highest < math.inf):  # NaN fails both comparisons
        return "a logprob is not finite"
    if highest > LOGPROB_SLACK:
        return "a logprob is above 0"
    if np.count_nonzero((sample.logprobs != 0) > sample.loss_mask.view(np.bool_)):
        return "a token that was not sampled has a logprob"
    return None
