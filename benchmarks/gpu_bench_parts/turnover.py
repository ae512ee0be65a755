"""Decoding while requests end and begin, as they do in a run: beside steps in which the same number only decodes."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from statistics import fmean

from gpu_checks.decoding import Decoder
from gpu_checks.report import QWEN3_600M, SMALL, Checks, Machine, Report

from rollout_workers.inference.generation import Generation


@dataclass(slots=True, kw_only=True)
class Turnover:
    """Requests of which another begins as soon as one has ended; answers have 1 to `longest` tokens, all lengths as often."""

    decoder: Decoder
    batch: int
    prompt: int
    longest: int
    _lengths: random.Random = field(init=False, default_factory=lambda: random.Random(5))
    _running: dict[int, Generation] = field(init=False, default_factory=dict[int, Generation])

    def step(self) -> tuple[bool, float]:
        """Fill the batch and make a step: whether it computes prompts, and seconds."""
        missing = self.batch - len(self._running)
        for _ in range(missing):
            self._begin()
        started = time.perf_counter()
        self.decoder.core.step()  # ends when the host has the tokens
        return missing > 0, time.perf_counter() - started

    def _begin(self) -> None:
        tokens = self._lengths.randint(1, self.longest)
        (begun,) = self.decoder.start(1, self.prompt, tokens=tokens, finish=lambda: self._running.pop(begun.id))
        self._running[begun.id] = begun

    def finish(self) -> None:
        self.decoder.finish([*self._running.values()])


def turnover(machine: Machine, report: Report) -> None:
    """A step that computes prompts delays the running requests. It is a CUDA graph if the prompts have few tokens."""
    shape, batches, prompt, longest = (QWEN3_600M, (64, 256), 256, 512) if machine.is_gpu else (SMALL, (4,), 16, 24)
    decoder = Decoder(machine, shape, room_for=[(batch, prompt + longest) for batch in batches])
    for batch in batches:
        # A request that is looked at now has two thirds of an average answer: long ones are there for longer.
        steady = decoder.measure(batch, prompt + longest // 3, steps=32 if machine.is_gpu else 4)
        turning = Turnover(decoder=decoder, batch=batch, prompt=prompt, longest=longest)
        for _ in range(longest // 2):  # until requests of all ages are running
            turning.step()
        before, replays = decoder.core.metrics.tokens_generated, decoder.replays
        steps = [turning.step() for _ in range(longest)]
        replays = decoder.replays - replays
        tokens_per_s = (decoder.core.metrics.tokens_generated - before) / sum(seconds for _, seconds in steps)
        turning.finish()
        report.note(
            **{
                f"tokens_per_s_{batch}": tokens_per_s,
                f"steady_tokens_per_s_{batch}": steady.tokens_per_s,
                f"of_steady_{batch}": tokens_per_s / steady.tokens_per_s,
                f"steps_with_prompts_{batch}": fmean(with_prompts for with_prompts, _ in steps),
                f"steps_as_graphs_{batch}": replays / len(steps),
                f"ms_with_prompts_{batch}": 1e3 * fmean(seconds for with_prompts, seconds in steps if with_prompts),
                f"ms_without_{batch}": 1e3 * fmean(seconds for with_prompts, seconds in steps if not with_prompts),
            }
        )


CHECKS: Checks = {"turnover": turnover}
