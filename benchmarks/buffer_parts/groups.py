"""The rivals' rollouts as groups: the same bytes in our types."""

from __future__ import annotations

from dataclasses import replace

from rivals.rollouts import Rollout, group_of

from async_rl import types

PROMPT = "What is the next even number?"


def group(tokens: int, seed: int, *, size: int | None = None) -> types.RolloutGroup:
    """Make a group without a ticket."""
    rollouts = tuple(_rollout(rollout) for rollout in group_of(tokens, seed)[:size])
    task = types.Task(key=f"task{seed}", environment="arithmetic", prompt=PROMPT)
    return types.RolloutGroup(id="", task=task, rollouts=rollouts, worker="")


def tiny() -> types.RolloutGroup:
    """Make a group of one short rollout without a conversation, where only the number of groups matters."""
    short = group(8, seed=0, size=1)
    (rollout,) = short.rollouts
    return replace(short, rollouts=(replace(rollout, conversation=()),))


def _rollout(rollout: Rollout) -> types.Rollout:
    length = len(rollout["token_ids"])
    sample = types.Sample(
        token_ids=rollout["token_ids"],
        loss_mask=rollout["loss_mask"],
        logprobs=rollout["logprobs"],
        versions=(types.VersionSpan(version=0, start=rollout["prompt"], stop=length),),
    )
    return types.Rollout(
        samples=(sample,),
        reward=rollout["reward"],
        status=types.Status.OK,
        conversation=(types.Message(role="assistant", content=rollout["text"]),),
    )


def under(ticket: types.Ticket, group: types.RolloutGroup, worker: str) -> types.RolloutGroup:
    """Return the group as if it had been sampled under this ticket."""
    rollouts = tuple(_sampled_by(ticket.version, rollout) for rollout in group.rollouts)
    return replace(group, id=ticket.id, rollouts=rollouts, worker=worker)


def _sampled_by(version: int, rollout: types.Rollout) -> types.Rollout:
    (sample,) = rollout.samples
    (span,) = sample.versions
    return replace(rollout, samples=(replace(sample, versions=(replace(span, version=version),)),))
