"""A learner's step whose live tensors are counted, with values or, at any size, without."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from learner_parts.rollouts import groups_of
from torch._subclasses.fake_tensor import FakeTensorMode

from async_rl.config import Config
from async_rl.models.shape import ModelShape
from learner.batches.batch import RankMinibatch, pack_batch
from learner.objective import load_objective
from learner.ranks.distributed import init_distributed
from learner.ranks.model_set import build_model_set
from learner.ranks.trainer import RankTrainer
from memory_parts.live_tensors import LiveTensors, Moment, WithoutValues


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedStep:
    peaks: Mapping[Moment, int]
    """Bytes of live tensors at most."""
    largest: Sequence[tuple[str, int]]
    """What was alive at the highest of them, most first: the operation that made it and its shape, and the bytes."""
    resident: int
    """How much more memory the process had at most than before the model was built."""

    @property
    def peak(self) -> int:
        return max(self.peaks.values())


def tracked_step(run: Config, shape: ModelShape, lengths: Sequence[int], *, has_values: bool = True) -> TrackedStep:
    """Train two steps on rollouts of these lengths, in one packed row, and count the second: the first makes Adam's moments."""
    objective = load_objective(run.learner.objective)
    init_distributed(run)
    before = _resident()
    with ExitStack() as modes:
        if not has_values:
            fake = modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            modes.enter_context(WithoutValues(fake))
            # it packs objects into tensors, whose values would be lost; there is one rank
            modes.enter_context(patch("torch.distributed.all_gather_object", _gather_alone))
        live = modes.enter_context(LiveTensors())
        trainer = RankTrainer(build_model_set(run, objective, shape), objective, run)
        groups = groups_of([*lengths], group_size=len(lengths), vocab_size=shape.vocab_size, seed=1)
        batch = pack_batch(groups, objective=objective, capacity=sum(lengths))
        (minibatch,) = batch.minibatches
        portions = [RankMinibatch(rows=minibatch.shards[0], counts=minibatch.counts)]
        trainer.step(portions)
        live.restart()
        trainer.step(portions)
        return TrackedStep(
            peaks=dict(live.peaks),
            largest=live.largest_at_peak(),
            resident=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
        )


def _gather_alone(gathered: list[Any], own: Any, group: Any = None) -> None:
    gathered[0] = own


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
