"""The part of the Megatron engine that lives on its thread: model, KV cache, running generations."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from importlib.metadata import version
from statistics import fmean

import structlog
import torch
from torch import Tensor

from async_rl.config.rollout import WorkerConfig
from async_rl.megatron import parallel
from async_rl.megatron.attention.gathered_pages import keep_cudnn_out
from async_rl.megatron.attention.paged_attention import attention_for, kernel_name
from async_rl.megatron.engine import dynamic_engine as inference
from async_rl.megatron.engine.build import EngineSettings, build_engine, capture_decoding
from async_rl.megatron.engine.decode_graphs import DecodeGraphs
from async_rl.megatron.experts.grouped import fits_grouped_products
from async_rl.megatron.model import LayerSpec, build_model
from async_rl.megatron.parameters.full_parameters import FullParameterLoader
from async_rl.models.engine_limits import uses_cuda_graphs
from async_rl.models.shape import ModelShape
from async_rl.protocols import Tokenizer
from async_rl.supervision.liveness.daemon_thread import start_daemon_thread
from async_rl.transport.receiving.received_weights import ReceivedWeights
from rollout_workers.inference.cache_size import cache_gb
from rollout_workers.inference.generation import Generation
from rollout_workers.inference.rollout_engine import EngineMetrics
from rollout_workers.inference.sampling import BatchSampler
from rollout_workers.inference.stepped_engine import RECENT

OpenWeights = Callable[[], Mapping[str, Tensor]]
"""Opens full parameters; blocks."""

log = structlog.get_logger("rollout_workers.inference")


class EngineCore:
    """Not thread-safe: one thread builds it and calls it."""

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
        in_place: bool = False,
        num_parcels: int = 0,
    ) -> None:
        """`in_place`: new weights are read where a learner on the same GPU packed them, so no copy of them needs room.
        `num_parcels`: see engine_memory.
        """
        parallel.initialize(device=device, tensor=worker.tensor, expert=worker.expert)
        has_graphs = uses_cuda_graphs(
            shape,
            wanted=worker.cuda_graphs,
            on_gpu=device.type == "cuda",
            kernels=worker.kernels,
            layer_spec=layer_spec,
            tensor=worker.tensor,
            grouped_experts=fits_grouped_products(shape, device, dtype),
        )
        attention = attention_for(device, shape, worker.kv_block_tokens, worker.kernels, may_be_flash=not has_graphs)
        keep_cudnn_out(device)
        self._shape = shape
        self._device = device
        self._sampler = BatchSampler(tokenizer, device=device, seed=seed, kernels=worker.kernels)
        self._recomputes = worker.kv_on_swap == "recompute"
        self._steps = 0
        self._busy_s = 0.0
        self._queued_s: deque[float] = deque(maxlen=RECENT)
        self._queue_s = 0.0
        self._model = build_model(
            shape,
            device=device,
            dtype=dtype,
            seed=None,  # it serves nothing before version 0
            layer_spec=layer_spec,
            attention=attention,
        )
        self._loader = FullParameterLoader(self._model, shape)
        self._engine = build_engine(
            self._model,
            shape,
            self._sampler,
            EngineSettings(
                kv_cache_gb=cache_gb(
                    worker, shape, device=device, element=dtype.itemsize, in_place=in_place, num_parcels=num_parcels
                ),
                block_tokens=worker.kv_block_tokens,
                max_requests=worker.max_running,
                prompt_tokens_per_step=worker.prompt_tokens_per_step,
                reuse_prefixes=worker.prefix_reuse,
                async_scheduling=worker.async_scheduling,
            ),
        )
        self.kernel = kernel_name(attention)
        self.graphs = self._captured(worker) if has_graphs else None
        log.info("engine is ready", device=str(device), attention=self.kernel, megatron_core=version("megatron-core"))

    @property
    def version(self) -> int:
        return self._sampler.version

    @property
    def can_step(self) -> bool:
        return self.version >= 0 and bool(self._sampler.running)

    @property
    def metrics(self) -> EngineMetrics:
        memory = self._engine.memory
        return EngineMetrics(
            tokens_generated=self._sampler.tokens_generated,
            steps=self._steps,
            busy_s=self._busy_s,
            active_requests=len(self._sampler.running),
            waiting_requests=len(self._engine.waiting_request_ids),
            queue_s=self._queue_s,
            kv_blocks_used=memory.used,
            kv_blocks=memory.blocks,
            prefix_tokens_reused=memory.prefix_tokens_reused,
            preemptions=memory.preemptions,
        )

    def submit(self, generation: Generation) -> None:
        if (seed := generation.sampling.seed) is not None:
            generation.random = torch.Generator(self._device).manual_seed(seed)
        generation.submitted_at = time.perf_counter()
        self._sampler.running[generation.id] = generation
        self._enqueue(generation)

    def cancel(self, generation: Generation) -> None:
        """Cancel a generation: at once while it waits, with the next step once it runs."""
        if generation.id not in self._sampler.running:
            return
        generation.is_cancelled = True
        if self._engine.withdraw(generation.id):
            del self._sampler.running[generation.id]

    def begin_stage(self, weights: OpenWeights) -> Future[Mapping[str, Tensor]]:
        """Open full parameters and bring this rank's parts from host memory to its GPU, on a thread, beside decoding. On GPUs
        they stay where they are. `swap` takes the result.
        """
        return start_daemon_thread(lambda: self._staged(weights()), name="weight-stage")

    def _staged(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        are_on_gpus = isinstance(weights, ReceivedWeights) and weights.are_on_gpus
        return weights if are_on_gpus else self._loader.stage(weights, self._device)

    def swap(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Load other weights. Running generations continue, with their KV cache or recomputed (`worker.kv_on_swap`)."""
        if number <= self.version:
            raise ValueError(f"weights of version {number} cannot replace version {self.version}: versions only grow")
        self._loader.load(tensors)
        if self._device.type == "cuda":  # the caller may overwrite `tensors` on another stream as soon as we return
            torch.cuda.current_stream(self._device).synchronize()
        if self.graphs is not None:
            with torch.inference_mode():
                self.graphs.refresh()
        self._sampler.version = number
        if self._recomputes:
            inference.clear(self._engine)
            for generation in self._sampler.drop_cancelled():
                self._enqueue(generation)
        else:
            self._engine.forget_prefixes()

    def step(self) -> None:
        # Counted first: completions are delivered within the step, and their receiver may read the metrics.
        self._steps += 1
        self._sampler.started = []  # a step that only launches the first forward pass samples nothing
        start = self._sampler.step_began = time.perf_counter()
        stepped = inference.step(self._engine)
        self._busy_s += time.perf_counter() - start
        if lost := [request for request in stepped.ended if request in self._sampler.running]:
            # Their callers would wait forever: Megatron must only end requests when the sampler says so.
            raise RuntimeError(f"Megatron ended generations {lost} on its own")
        for request in reversed(stepped.preempted):
            self._enqueue(self._sampler.running[request], first=True)
        if self._sampler.started:
            self._queued_s.extend(generation.queued_s for generation in self._sampler.started)
            self._queue_s = fmean(self._queued_s)

    def _enqueue(self, generation: Generation, *, first: bool = False) -> None:
        """Queue a generation. Tokens sampled so far become part of its prompt."""
        so_far = [*generation.prompt, *generation.token_ids]
        left = generation.sampling.max_tokens - len(generation.token_ids)
        inference.submit(self._engine, generation.id, so_far, left, first=first)

    def close(self) -> None:
        inference.retire(self._engine)

    def _captured(self, worker: WorkerConfig) -> DecodeGraphs | None:
        """Steps as CUDA graphs; None, with `auto`, where the device refuses them."""
        try:
            return capture_decoding(
                self._engine, self._shape, requests=worker.max_running, prompt_tokens=worker.prompt_tokens_per_step
            )
        except RuntimeError as error:  # torch raises nothing else for what CUDA or Triton cannot do
            if worker.cuda_graphs == "always":
                raise
            log.warning("steps could not be captured, and run without CUDA graphs", reason=str(error))
            return None
