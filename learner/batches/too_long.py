"""Rollouts with samples longer than model.max_sequence, which the model cannot compute: cut, masked or left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from async_rl.config.learner import TooLong
from async_rl.types import Rollout, Sample, Status, TakenGroup, VersionSpan


def within(groups: Sequence[TakenGroup], longest: int, treatment: TooLong) -> list[TakenGroup]:
    """Return the groups with `treatment` applied to rollouts that have a sample of more than `longest` tokens.

    truncate: their first `longest` tokens are trained, as of an answer that a length limit cut. mask: the reward counts in
    the group's baseline only. drop: as a failed episode, in neither baseline nor loss.
    """
    return [
        replace(
            taken,
            group=replace(taken.group, rollouts=tuple(_fitted(each, longest, treatment) for each in taken.group.rollouts)),
        )
        for taken in groups
    ]


def num_too_long(groups: Sequence[TakenGroup], longest: int) -> int:
    treated = (each for taken in groups for each in taken.group.rollouts if each.status is not Status.FAILED)
    return sum(len(sample) > longest for rollout in treated for sample in rollout.samples)


def _fitted(rollout: Rollout, longest: int, treatment: TooLong) -> Rollout:
    if rollout.status is Status.FAILED or all(len(sample) <= longest for sample in rollout.samples):
        return rollout
    match treatment:
        case "truncate":
            status = Status.TRUNCATED if rollout.status is Status.OK else rollout.status
            return replace(rollout, samples=tuple(_cut(sample, longest) for sample in rollout.samples), status=status)
        case "mask":
            status = Status.MASKED
        case "drop":
            status = Status.FAILED
    return replace(rollout, status=status)


def _cut(sample: Sample, longest: int) -> Sample:
    return Sample(
        token_ids=sample.token_ids[:longest],
        loss_mask=sample.loss_mask[:longest],
        logprobs=sample.logprobs[:longest],
        versions=tuple(
            VersionSpan(version=span.version, start=span.start, stop=min(span.stop, longest))
            for span in sample.versions
            if span.start < longest
        ),
    )
