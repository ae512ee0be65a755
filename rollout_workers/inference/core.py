"""Everything of the engine that lives on its thread: model, KV cache, running generations."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

import structlog
import torch
from torch import Tensor

from async_rl.megatron import inference, parallel
from async_rl.megatron.model import LayerSpec, build_model
from async_rl.megatron.paged_attention import attention_for, kernel_name, page_tokens
from async_rl.megatron.parameters import load_full
from async_rl.model_shape import ModelShape
from async_rl.protocols import Tokenizer
from async_rl.rollout_config import WorkerConfig
from rollout_workers.inference.generation import Generation
from rollout_workers.inference.sampling import BatchSampler

log = structlog.get_logger("rollout_workers.inference")

MAX_RUNNING = 256
"""Generations decoded at once; more of them wait in the engine's queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    tokens_generated: int
    steps: int
    busy_s: float
    """Spent inside engine steps."""
    active_requests: int
    """Running or waiting for room."""


class EngineCore:
    """Not thread-safe, on purpose: one thread builds it and calls it."""

    def __init__(
        self,
        *,
        shape: ModelShape,
        tokenizer: Tokenizer,
        worker: WorkerConfig,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        layer_spec: LayerSpec,
    ) -> None:
        parallel.initialize(device=device)
        block_tokens = page_tokens(device, worker.kv_block_tokens)
        self._shape = shape
        self._device = device
        self._sampler = BatchSampler(tokenizer, device=device, seed=seed)
        self._steps = 0
        self._busy_s = 0.0
        self._model = build_model(
            shape,
            device=device,
            dtype=dtype,
            seed=seed,
            layer_spec=layer_spec,
            attention=attention_for(device),
        )
        self._engine = inference.build_engine(
            self._model,
            shape,
            self._sampler,
            kv_cache_gb=worker.kv_cache_gb,
            block_tokens=block_tokens,
            max_requests=MAX_RUNNING,
        )
        self.kernel = kernel_name(device, dtype, block_tokens, shape.heads, shape.head_dim, shape.kv_heads)
        log.info("engine is ready", device=str(device), attention=self.kernel, megatron_core=version("megatron-core"))

    @property
    def version(self) -> int:
        return self._sampler.version

    @property
    def can_step(self) -> bool:
        return self.version >= 0 and bool(self._sampler.running)

    @property
    def metrics(self) -> EngineMetrics:
        return EngineMetrics(
            tokens_generated=self._sampler.tokens_generated,
            steps=self._steps,
            busy_s=self._busy_s,
            active_requests=len(self._sampler.running),
        )

    def submit(self, generation: Generation) -> None:
        if (seed := generation.sampling.seed) is not None:
            generation.random = torch.Generator(self._device).manual_seed(seed)
        self._sampler.running[generation.id] = generation
        inference.submit(self._engine, generation.id, generation.prompt, generation.sampling.max_tokens)

    def cancel(self, generation: Generation) -> None:
        """Free its place: at once while it waits, with the next step once it runs."""
        if generation.id not in self._sampler.running:
            return
        generation.is_cancelled = True
        if inference.withdraw(self._engine, generation.id):
            del self._sampler.running[generation.id]

    def swap(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Other weights under the running generations, which keep their KV cache and go on."""
        if number <= self.version:
            raise ValueError(f"weights of version {number} cannot replace version {self.version}: versions only grow")
        load_full(self._model, self._shape, tensors)
        if self._device.type == "cuda":  # the caller may overwrite `tensors` on another stream as soon as we return
            torch.cuda.current_stream(self._device).synchronize()
        self._sampler.version = number

    def step(self) -> None:
        # Counted first: completions leave in the middle of a step, and whoever gets one may look at the metrics.
        self._steps += 1
        start = time.perf_counter()
        ended = inference.step(self._engine)
        self._busy_s += time.perf_counter() - start
        if lost := [request for request in ended if request in self._sampler.running]:
            # Somebody would wait for ever: Megatron ends requests only when the sampler says so.
            raise RuntimeError(f"Megatron ended generations {lost} on its own")

    def close(self) -> None:
        inference.retire(self._engine)
