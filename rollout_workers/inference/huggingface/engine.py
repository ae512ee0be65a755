"""A rollout engine over transformers' own model class: `worker.backend: hf`.

Each step decodes one token for every running generation in one batch, and computes waiting prompts that have room.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from statistics import fmean

import structlog
import torch
from torch import Tensor

from async_rl.config.rollout import WorkerConfig
from async_rl.errors import ConfigError
from async_rl.megatron.attention.gathered_pages import keep_cudnn_out
from async_rl.models.shape import ModelShape
from async_rl.protocols import Tokenizer
from rollout_workers.inference.cache_size import cache_gb
from rollout_workers.inference.generation import Generation
from rollout_workers.inference.huggingface.batch_cache import BatchCache
from rollout_workers.inference.huggingface.weights import HuggingFaceWeights, empty_model
from rollout_workers.inference.rollout_engine import EngineMetrics, EngineSetup
from rollout_workers.inference.sampling import BatchSampler
from rollout_workers.inference.stepped_engine import RECENT, SteppedEngine

log = structlog.get_logger("rollout_workers.inference")


class HuggingFaceEngine(SteppedEngine):
    """Samples with transformers, on one device."""

    def __init__(self, setup: EngineSetup) -> None:
        (device,) = setup.devices

        def build() -> HuggingFaceCore:
            return HuggingFaceCore(
                shape=setup.shape,
                tokenizer=setup.tokenizer,
                worker=setup.worker,
                device=device,
                dtype=setup.dtype,
                seed=setup.seed,
            )

        super().__init__(setup.shape, setup.tokenizer, setup.sampling, device=device, dtype=setup.dtype, build=build)


class HuggingFaceCore:
    """Not thread-safe: one thread builds it and calls it.

    A generation starts when the cache could hold all running ones at their maximum length, so none is ever preempted.
    """

    def __init__(
        self,
        *,
        shape: ModelShape,
        tokenizer: Tokenizer,
        worker: WorkerConfig,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        keep_cudnn_out(device)
        self._device = device
        self._max_running = worker.max_running
        self._recomputes = worker.kv_on_swap == "recompute"
        self._shares_prompts = worker.prefix_reuse
        self._prompt_tokens = worker.prompt_tokens_per_step
        self._model = empty_model(shape, device=device, dtype=dtype)
        gb = cache_gb(worker, shape, device=device, element=dtype.itemsize)
        token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype.itemsize
        self._cache_tokens = int(gb * 2**30) // token_bytes
        """Room of the cache, padding included."""
        if self._cache_tokens < shape.context_tokens:
            raise ConfigError(
                f"worker.kv_cache_gb: {gb:g} GB hold {self._cache_tokens} tokens, fewer than one sequence of "
                f"{shape.context_tokens} tokens; give it at least {shape.context_tokens * token_bytes / 2**30:.3g} GB, or "
                "lower model.max_sequence"
            )
        self._weights = HuggingFaceWeights(self._model, shape)
        self._sampler = BatchSampler(tokenizer, device=device, seed=seed, kernels=worker.kernels)
        self._waiting: deque[Generation] = deque()
        self._rows: list[Generation] = []
        """The generation of each row of the cache."""
        self._cache = BatchCache(device)
        self._steps = 0
        self._busy_s = 0.0
        self._tokens_reused = 0
        self._queued_s: deque[float] = deque(maxlen=RECENT)
        self.kernel = str(self._model.config._attn_implementation)
        log.info("engine is ready", device=str(device), attention=self.kernel, transformers=version("transformers"))

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
            waiting_requests=len(self._waiting),
            queue_s=fmean(self._queued_s) if self._queued_s else 0.0,
            kv_blocks_used=self._cache.num_tokens,
            kv_blocks=self._cache_tokens,
            prefix_tokens_reused=self._tokens_reused,
        )

    def submit(self, generation: Generation) -> None:
        if (seed := generation.sampling.seed) is not None:
            generation.random = torch.Generator(self._device).manual_seed(seed)
        generation.submitted_at = time.perf_counter()
        self._sampler.running[generation.id] = generation
        self._waiting.append(generation)

    def cancel(self, generation: Generation) -> None:
        if self._sampler.running.pop(generation.id, None) is None:
            return
        if generation in self._waiting:
            self._waiting.remove(generation)
        else:
            self._drop({generation.id})

    def swap(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Load other weights. Running generations continue, with their KV cache or recomputed (`worker.kv_on_swap`)."""
        if number <= self.version:
            raise ValueError(f"weights of version {number} cannot replace version {self.version}: versions only grow")
        self._weights.load(tensors)
        if self._device.type == "cuda":  # the caller may overwrite `tensors` on another stream as soon as we return
            torch.cuda.current_stream(self._device).synchronize()
        self._sampler.version = number
        if self._recomputes:
            self._waiting.extendleft(sorted(self._rows, key=_length, reverse=True))
            self._drop({generation.id for generation in self._rows})

    @torch.inference_mode()
    def step(self) -> None:
        # Counted first: completions are delivered within the step, and their receiver may read the metrics.
        self._steps += 1
        start = self._sampler.step_began = time.perf_counter()
        logits = [self._decode()] if self._rows else []
        logits += self._compute_prompts()
        requests = [generation.id for generation in self._rows]
        self._sampler.sample(torch.cat(logits), requests, version=self.version)
        self._queued_s.extend(generation.queued_s for generation in self._sampler.started)
        self._drop(self._sampler.finished(requests))
        self._busy_s += time.perf_counter() - start

    def close(self) -> None:
        self._drop({generation.id for generation in self._rows})

    def _decode(self) -> Tensor:
        """Logits of the running generations [rows, vocabulary]; their newest token enters the cache."""
        newest = torch.tensor([[generation.token_ids[-1]] for generation in self._rows], device=self._device)
        return self._cache.extend(self._model, newest)

    def _compute_prompts(self) -> list[Tensor]:
        """Logits of the generations that start in this step, as many as have room and `prompt_tokens_per_step` allows."""
        logits: list[Tensor] = []
        left = self._prompt_tokens
        while left > 0 and (batch := self._next_batch(left)):
            logits.append(self._start(batch))
            left -= len(batch) * _length(batch[0])
        return logits

    def _next_batch(self, most_tokens: int) -> list[Generation]:
        """The first waiting generations with room that are equally long, so that their prompts need no padding. Only a single
        one may have more than `most_tokens`.
        """
        batch: list[Generation] = []
        while self._waiting and self._has_room(candidate := self._waiting[0], batch):
            length = _length(candidate)
            if batch and (length != _length(batch[0]) or (len(batch) + 1) * length > most_tokens):
                break
            batch.append(self._waiting.popleft())
        return batch

    def _has_room(self, candidate: Generation, batch: Sequence[Generation]) -> bool:
        running = [*self._rows, *batch, candidate]
        longest = max(len(each.prompt) + each.sampling.max_tokens for each in running)
        return len(running) <= self._max_running and len(running) * longest <= self._cache_tokens

    def _start(self, batch: list[Generation]) -> Tensor:
        """Compute equally long prompts, equal ones once, and add their generations to the running ones."""
        prompts = torch.tensor([[*each.prompt, *each.token_ids] for each in batch], device=self._device)
        distinct, row_of = prompts, torch.arange(len(batch), device=self._device)
        if self._shares_prompts:
            distinct, row_of = prompts.unique(dim=0, return_inverse=True)
        computed = BatchCache(self._device)
        logits = torch.empty(0)
        for chunk in distinct.split(max(1, self._prompt_tokens // len(distinct)), dim=1):
            logits = computed.extend(self._model, chunk)
        computed.select(row_of)
        self._tokens_reused += prompts.numel() - distinct.numel()
        self._cache.append(computed)
        self._rows += batch
        return logits[row_of]

    def _drop(self, requests: set[int]) -> None:
        if not requests:
            return
        kept = [row for row, generation in enumerate(self._rows) if generation.id not in requests]
        self._rows = [self._rows[row] for row in kept]
        self._cache.select(torch.tensor(kept, dtype=torch.long, device=self._device))


def _length(generation: Generation) -> int:
    return len(generation.prompt) + len(generation.token_ids)
