"""Builds the inference engine for the installed version of megatron-core.

before 0.17   SchedulingEngine (scheduling.py) schedules, shares prefixes and preempts
since 0.17    Megatron's own engine does
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from async_rl.errors import ConfigError
from async_rl.megatron import host
from async_rl.megatron.compat import GPTModel
from async_rl.megatron.engine.async_scheduling import AsyncController, async_schedule_mode
from async_rl.megatron.engine.decode_graphs import CudaCapture, DecodeGraphs, run_again
from async_rl.megatron.engine.decode_step import DecodeStep
from async_rl.megatron.engine.dynamic_engine import Context, Controller, Engine, KVCacheUsage, NullTokenizer, Sampler
from async_rl.megatron.experts.sharing import share_tokens
from async_rl.megatron.layers.residual_norms import fuse_residual_norms
from async_rl.models.engine_limits import check_kv_cache
from async_rl.models.shape import ModelShape

with host.importing():
    from megatron.core.inference.contexts import DynamicInferenceContext, dynamic_context
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding


EVICTED_AT_ONCE = 16
"""Remembered blocks that are given up together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of an engine, from the `worker` section."""

    kv_cache_gb: float
    block_tokens: int
    max_requests: int
    prompt_tokens_per_step: int
    reuse_prefixes: bool
    async_scheduling: bool = False


class EvictingContext(Context):  # pyright: ignore[reportGeneralTypeIssues]
    """The context since megatron-core 0.17, which would pause requests for want of blocks while some are only remembered."""

    def resume_paused_requests(self, *args: Any, **kwargs: Any) -> Any:
        blocks = self.kv_block_allocator
        missing = self.paused_request_count - blocks.total_avail
        if missing > 0 and blocks.enable_prefix_caching:
            remembered = int(blocks.get_evictable_block_count())
            # A search for the oldest costs as much for many as for one.
            blocks.evict_lru_blocks(min(remembered, max(missing, EVICTED_AT_ONCE)))
        # Megatron counts a shared block once for each request that holds it, and would preempt siblings needlessly.
        blocks.get_active_avail = lambda: blocks.total_count * self.max_requests
        try:
            return super().resume_paused_requests(*args, **kwargs)
        finally:
            del blocks.get_active_avail


class ConfiguredEngine(Engine):
    """The engine since megatron-core 0.17, which shares prefixes and resubmits evicted requests itself."""

    def _should_run_async_sched_overlap(self) -> bool:
        # Only a step without overlap keeps the place of a partly computed prompt that waits for room.
        return self.context.chunked_prefill_request_id == -1 and super()._should_run_async_sched_overlap()

    def forget_prefixes(self) -> None:
        blocks = self.context.kv_block_allocator
        if not blocks.enable_prefix_caching:
            return
        with torch.inference_mode():
            blocks._deregister_blocks(((blocks.block_ref_counts == 0) & (blocks.block_hashes != -1)).nonzero()[:, 0])
            blocks.block_hashes.fill_(-1)
            blocks.block_parent_id.fill_(-1)
            blocks.block_child_count.fill_(0)
        blocks.kv_hash_to_block_id.clear()
        if (partial := self.context.chunked_prefill_request_id) != -1:
            self.get_request(partial).precomputed_block_hashes.clear()

    def post_process_requests(
        self,
        request_ids: Tensor,
        finished: Tensor,
        evicted: Tensor | None,
        step_s: float,
        sample: Tensor,
        *args: Any,
        **more: Any,
    ) -> Any:
        """Record the tokens of a step. Megatron's own also keeps statistics of each."""
        partial = {self.context.chunked_prefill_request_id, more.get("consumed_chunked_prefill_request_id", -1)}
        if partial != {-1} or len(finished) or evicted is not None:
            return super().post_process_requests(request_ids, finished, evicted, step_s, sample, *args, **more)
        running = request_ids.tolist()
        for request, token in zip(running, sample.tolist(), strict=True):
            self.get_request(request).generated_tokens.append(token)
        return running, []

    @property
    def memory(self) -> KVCacheUsage:
        blocks = self.context.kv_block_allocator
        idle = int(blocks.get_evictable_block_count()) if blocks.enable_prefix_caching else 0
        return KVCacheUsage(
            blocks=blocks.total_count - 1,
            used=blocks.get_total_used() - idle,
            prefix_tokens_reused=self._prefill_tokens_skipped,
            preemptions=self.evicted_request_count,
        )


def build_engine(model: GPTModel, shape: ModelShape, sampler: Sampler, settings: EngineSettings) -> Engine:
    """Build an engine over `model`, used on the calling thread. Raises ConfigError if the KV cache is too small."""
    check_kv_cache(
        shape,
        gb=settings.kv_cache_gb,
        block_tokens=settings.block_tokens,
        tensor=model.config.tensor_model_parallel_size,
        element=model.config.params_dtype.itemsize,
    )
    if host.is_needed():
        dynamic_context.triton_append_key_value_cache = None
    if settings.async_scheduling and async_schedule_mode() is None:
        raise ConfigError(
            f"worker.async_scheduling needs megatron-core 0.19, and {version('megatron-core')} is installed; "
            "leave it out, or use Python 3.12, where pip installs the newer one"
        )
    model.eval()
    _without_autograd(model)
    fuse_residual_norms(model, next(model.parameters()).device)
    if shape.experts is not None:
        share_tokens(model)
    with host.on_host(), host.quiet(), torch.inference_mode():
        build = _build_with_config if _has_inference_config() else _build_with_arguments
        engine = build(model, shape, settings)
        # Attention reads whole pages and masks unwritten tokens, which therefore must not be NaN.
        engine.context.memory_buffer.zero_()
    engine.controller.sampler = sampler
    engine.controller.vocab_size = shape.vocab_size
    engine.controller.set_stop_word_finished_ids_callback(engine.finished)
    return engine


def capture_decoding(engine: Engine, shape: ModelShape, *, requests: int, prompt_tokens: int) -> DecodeGraphs:
    """Have the steps of an engine in which at most `requests` decode, and at most `prompt_tokens` of prompts are computed,
    captured as CUDA graphs, now: its weights may come later. Without a GPU they run on the graphs' tensors, uncaptured.
    """
    context, model = engine.context, engine.controller.inference_wrapped_model.model
    with torch.inference_mode():
        graphs = DecodeGraphs(
            DecodeStep(model, context),
            requests=requests,
            prompt_tokens=prompt_tokens,
            columns=context.request_to_kv_block_ids.shape[1],
            context_tokens=shape.context_tokens,
            device=context.memory_buffer.device,
            capture=run_again if host.is_needed() else CudaCapture(),
        )
    engine.controller.graphs = graphs
    return graphs


def _without_autograd(model: GPTModel) -> None:
    """Replace the autograd functions of Megatron's linear layers, whose Python overhead exceeds the matrix product."""
    has_one_rank = model.config.tensor_model_parallel_size == 1
    for layer in model.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            layer._forward_impl = _product
        if has_one_rank and (forward := _FORWARDS_OF_ONE_RANK.get(type(layer))) is not None:
            layer.forward = partial(forward, layer)


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
    return functional.linear(input, weight, bias)


def _linear(layer: Any, input_: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, Tensor | None]:
    """Forward of a linear layer that has nothing to gather or to reduce. Returns the bias if the caller adds it."""
    own = weight if weight is not None else layer.weight
    if layer.skip_bias_add:
        return functional.linear(input_, own), layer.bias
    return functional.linear(input_, own, layer.bias), None


def _embedding(layer: Any, input_: Tensor) -> Tensor:
    return functional.embedding(input_, layer.weight)


_FORWARDS_OF_ONE_RANK: dict[type[nn.Module], Callable[..., Any]] = {
    ColumnParallelLinear: _linear,
    RowParallelLinear: _linear,
    VocabParallelEmbedding: _embedding,
}


def _has_inference_config() -> bool:
    return (
        importlib.util.find_spec("megatron.core.inference.config") is not None
        and "inference_config" in inspect.signature(DynamicInferenceContext.__init__).parameters
    )


def _max_tokens(settings: EngineSettings) -> int:
    """Maximum tokens per step: one for each decoding request, plus a chunk of prompts."""
    fewest = 3  # with two, megatron-core 0.19 never admits a prompt of which it remembers all blocks but the last
    return max(settings.max_requests + settings.prompt_tokens_per_step, fewest)


def _build_with_arguments(model: GPTModel, shape: ModelShape, settings: EngineSettings) -> Engine:
    from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import InferenceWrapperConfig

    from async_rl.megatron.engine.scheduling import SchedulingEngine, SharingContext

    dtype = model.config.params_dtype
    context = SharingContext(
        params_dtype=dtype,
        num_layers=shape.layers,
        kv_channels=shape.head_dim,
        num_attention_heads=shape.kv_heads,  # this argument means the heads of the cache
        max_sequence_length=shape.context_tokens,
        buffer_size_gb=settings.kv_cache_gb,
        block_size_tokens=settings.block_tokens,
        max_requests=settings.max_requests,
        max_tokens=_max_tokens(settings),
        tensor_model_parallel_size=model.config.tensor_model_parallel_size,
        pipeline_model_parallel_size=1,
        materialize_only_last_token_logits=True,
    )
    wrapper = InferenceWrapperConfig(
        hidden_size=shape.hidden,
        params_dtype=dtype,
        inference_batch_times_seqlen_threshold=-1,
        padded_vocab_size=model.vocab_size,
        inference_max_requests=settings.max_requests,
        inference_max_seq_length=shape.context_tokens,
    )
    return SchedulingEngine(
        Controller(GPTInferenceWrapper(model, wrapper, context), NullTokenizer()),
        context,
        random_seed=0,
        enable_chunked_prefill=True,
        prompt_tokens_per_step=settings.prompt_tokens_per_step,
        reuse_prefixes=settings.reuse_prefixes,
    )


def _build_with_config(model: GPTModel, shape: ModelShape, settings: EngineSettings) -> Engine:
    from megatron.core.inference.config import (  # pyright: ignore[reportMissingImports]
        InferenceConfig,
        PrefixCachingEvictionPolicy,
    )

    context = EvictingContext(
        model.config,
        InferenceConfig(
            max_sequence_length=shape.context_tokens,
            buffer_size_gb=settings.kv_cache_gb,
            block_size_tokens=settings.block_tokens,
            max_requests=settings.max_requests,
            max_tokens=_max_tokens(settings),
            materialize_only_last_token_logits=True,
            enable_chunked_prefill=True,
            enable_prefix_caching=settings.reuse_prefixes,
            prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
            **({"async_sched_mode": async_schedule_mode()} if settings.async_scheduling else {}),
        ),
    )
    _register_blocks_once(context.kv_block_allocator)
    controller = AsyncController if settings.async_scheduling else Controller
    return ConfiguredEngine(controller(GPTInferenceWrapper(model, context), NullTokenizer()), context)


def _register_blocks_once(blocks: Any) -> None:
    """Keep Megatron from registering a block under the hash that it has: its parent would count one child twice, and never be
    evicted. It does so where a chunk of a prompt ends within a known block.
    """
    register = blocks.register_kv_block_hashes

    def register_new(block_ids: list[int], block_hashes: list[int], parent_hashes: list[int] | None = None) -> None:
        held = blocks.block_hashes[block_ids].tolist()
        new = [number for number, (own, given) in enumerate(zip(held, block_hashes, strict=True)) if own != given]
        parents = None if parent_hashes is None else [parent_hashes[number] for number in new]
        register([block_ids[number] for number in new], [block_hashes[number] for number in new], parents)

    blocks.register_kv_block_hashes = register_new
