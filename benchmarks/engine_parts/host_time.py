"""Measure the thread CPU time of an engine step outside its layers: on a GPU the time that the device may wait for Python.

Of thread CPU time, unlike wall time, other load on the machine takes little.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, median

import torch
from torch import nn

from async_rl.config.rollout import WorkerConfig
from async_rl.megatron.parameters.full_parameters import specs
from async_rl.models.shape import ModelShape
from async_rl.protocols import Tokenizer
from rollout_workers.inference.engine_core import EngineCore
from rollout_workers.inference.generation import Generation, Sampling

CPU = torch.device("cpu")
PROMPT_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """Milliseconds of thread CPU time."""

    batch: int
    decode_ms: float
    """Median step in which all requests decode, layers apart."""
    turnover_ms: float
    """Mean step of a batch in which every request that ends is replaced at once, layers apart."""
    layer_ms: float
    """One layer of a decode step, median."""
    linear_ms: float
    """One call of a bare torch.nn.Linear for the same batch."""


class WatchedCore(EngineCore):
    """An engine of one small layer that knows how long the layer took."""

    def __init__(self, tokenizer: Tokenizer, max_positions: int) -> None:
        shape = ModelShape(
            hidden=16, layers=1, heads=1, kv_heads=1, head_dim=16, ffn=32, vocab_size=tokenizer.vocab_size,
            max_positions=max_positions, rope_theta=1e4, init_std=0.02,
        )  # fmt: skip
        dtype = torch.float32
        super().__init__(
            shape=shape,
            tokenizer=tokenizer,
            worker=WorkerConfig(kv_cache_gb=0.25),
            device=CPU,
            dtype=dtype,
            seed=7,
            layer_spec="local",
        )
        self.ids = itertools.count()
        (layer,) = self._model.decoder.layers
        layer.register_forward_pre_hook(lambda *_: self._enter())
        layer.register_forward_hook(lambda *_: self._leave())
        self.swap(0, {spec.name: torch.randn(spec.shape) for spec in specs(shape, dtype)})

    def _enter(self) -> None:
        self._entered = time.thread_time()

    def _leave(self) -> None:
        self.layer_s = time.thread_time() - self._entered


def host_time(batch: int, steps: int, tokenizer: Tokenizer) -> HostTime:
    """Measure `steps` steps of each kind. `tokenizer` must end no generation before its limit."""
    core = WatchedCore(tokenizer, max_positions=PROMPT_TOKENS + 2 * steps)
    together = list(_steps(core, [2 * steps - 1] * batch, at_once=batch))
    staggered = list(_steps(core, [steps // 2 + number % steps for number in range(6 * batch)], at_once=batch))
    return HostTime(
        batch=batch,
        decode_ms=1e3 * median(outside for outside, _ in together[-steps:-1]),
        turnover_ms=1e3 * fmean(outside for outside, _ in staggered[steps : 4 * steps]),
        layer_ms=1e3 * median(layer for _, layer in together[-steps:-1]),
        linear_ms=1e3 * _linear_s(batch),
    )


def _steps(core: WatchedCore, lengths: list[int], at_once: int) -> Iterator[tuple[float, float]]:
    """Generate answers of these lengths. Yields the time of each step outside and inside the layer."""
    ended: list[object] = []
    waiting = [
        Generation(
            id=next(core.ids),
            prompt=[4 + (number + place) % 8 for place in range(PROMPT_TOKENS)],
            sampling=Sampling(max_tokens=length, temperature=1.0, top_p=1.0, top_k=0, stop=(), stop_token_ids=(), seed=None),
            finish=ended.append,
        )
        for number, length in enumerate(lengths)
    ]
    submitted = 0
    while len(ended) < len(waiting):
        while submitted < min(len(waiting), len(ended) + at_once):
            core.submit(waiting[submitted])
            submitted += 1
        started = time.thread_time()
        core.step()
        yield time.thread_time() - started - core.layer_s, core.layer_s


def _linear_s(batch: int, calls: int = 2000) -> float:
    linear, rows = nn.Linear(16, 16), torch.randn(batch, 16)
    with torch.inference_mode():
        started = time.thread_time()
        for _ in range(calls):
            linear(rows)
        return (time.thread_time() - started) / calls
