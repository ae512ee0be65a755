"""Megatron's dynamic inference engine, built the same way for every supported version of megatron-core."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from async_rl.errors import ConfigError
from async_rl.megatron import host
from async_rl.megatron.compat import GPTModel
from async_rl.model_shape import ModelShape

with host.quiet():
    from megatron.core.inference import utils as inference_utils
    from megatron.core.inference.contexts import DynamicInferenceContext, dynamic_context
    from megatron.core.inference.engines import DynamicInferenceEngine
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
    from megatron.core.inference.sampling_params import SamplingParams
    from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController


PROMPT_TOKENS_PER_STEP = 4096
"""Bounds the memory of one forward pass; a longer prompt still goes in one piece."""


class Sampler(Protocol):
    """Turns logits into tokens, and decides who is done. Both are called once per engine step, in this order."""

    def sample(self, logits: Tensor, requests: Sequence[int]) -> Tensor:
        """One token per row of logits [requests, vocabulary]; `requests` are their ids."""
        ...

    def finished(self, requests: Sequence[int]) -> set[int]:
        """Which of the requests that were just sampled for end with that token."""
        ...


class _NoText:
    """The engine speaks token ids only; Megatron detokenizes what is finished and asks for an end token."""

    eod = -1
    bos = None

    def detokenize(self, *_: object, **__: object) -> str:
        return ""


class _Context(DynamicInferenceContext):  # pyright: ignore[reportGeneralTypeIssues]
    """Without CUDA graphs nothing gains from rounding up the number of tokens or requests of a step."""

    TOKEN_ROUNDER = 1
    REQUEST_ROUNDER = 1


class _Controller(TextGenerationController):
    """Leaves sampling to our sampler: one call for all requests, log-probabilities of the distribution sampled from."""

    sampler: Sampler

    def _dynamic_step_sample_bookkeeping(self) -> None: ...

    def _dynamic_step_sample_logits(self, logits: Tensor | None = None) -> None:
        context: Any = self.inference_wrapped_model.inference_context
        requests = context.request_ids[context.paused_request_count : context.total_request_count].tolist()
        # Some versions pass the logits, others leave them here.
        logits = logits if logits is not None else self._all_logits_cuda  # pyright: ignore[reportAttributeAccessIssue]
        tokens = self.sampler.sample(logits[0, : len(requests)], requests)
        self._sampled_tokens_cuda[: len(requests)] = tokens


class Engine(DynamicInferenceEngine):  # pyright: ignore[reportGeneralTypeIssues]  # a decorator hides the class
    """Has an event loop of its own, where Megatron would share one between all engines of the process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._loop = asyncio.new_event_loop()
        super().__init__(*args, **kwargs)


def build_engine(
    model: GPTModel, shape: ModelShape, sampler: Sampler, *, kv_cache_gb: float, block_tokens: int, max_requests: int
) -> Engine:
    """An engine over `model` on the calling thread. It asks `sampler` for tokens and for who is done."""
    block_bytes = _block_bytes(model, shape, block_tokens)
    num_blocks = int(kv_cache_gb * 2**30) // block_bytes
    needed = -(-shape.max_positions // block_tokens) + 1
    if num_blocks < needed + 1:
        raise ConfigError(
            f"worker.kv_cache_gb: {kv_cache_gb:g} GB hold {num_blocks} blocks of {block_tokens} tokens, but one sequence of "
            f"{shape.max_positions} tokens needs {needed + 1}; give it at least {(needed + 1) * block_bytes / 2**30:.3g} GB"
        )
    if host.is_needed():
        dynamic_context.triton_append_key_value_cache = None
    model.eval()
    max_tokens = max(shape.max_positions, max_requests, PROMPT_TOKENS_PER_STEP)
    with host.on_host(), host.quiet(), torch.inference_mode():
        build = _build_with_config if _has_inference_config() else _build_with_arguments
        engine = build(model, shape, kv_cache_gb, block_tokens, max_requests, max_tokens)
        # Attention reads whole pages and masks what no token was written to: garbage there must not be NaN.
        engine.context.memory_buffer.zero_()
    engine.controller.sampler = sampler
    engine.controller.set_stop_word_finished_ids_callback(sampler.finished)
    return engine


def submit(engine: Engine, request: int, prompt: Sequence[int], max_tokens: int) -> None:
    """Queue a request; the engine takes it in as soon as it has room."""
    engine.add_request(request, list(prompt), SamplingParams(num_tokens_to_generate=max_tokens, termination_id=-1))


def withdraw(engine: Engine, request: int) -> bool:
    """Take back a request that still waits. False if it runs already: then the sampler must end it."""
    if request not in engine.waiting_request_ids:
        return False
    engine.waiting_request_ids.remove(request)
    del engine.requests[request]
    return True


def step(engine: Engine) -> list[int]:
    """One forward pass for everybody that has room; returns the requests that the engine let go of."""
    with torch.inference_mode():
        outcome = engine._loop.run_until_complete(engine.async_step())
    return [record.request_id for record in outcome["finished_request_records"]]


def retire(engine: Engine) -> None:
    """Leave nothing of the engine behind: neither its event loop nor Megatron's process-wide inference flag."""
    while tasks := asyncio.all_tasks(engine._loop):
        engine._loop.run_until_complete(asyncio.wait(tasks))
    engine._loop.close()
    if mode := getattr(inference_utils, "InferenceMode", None):
        mode.unset_active()


def _has_inference_config() -> bool:
    return (
        importlib.util.find_spec("megatron.core.inference.config") is not None
        and "inference_config" in inspect.signature(DynamicInferenceContext.__init__).parameters
    )


def _block_bytes(model: GPTModel, shape: ModelShape, block_tokens: int) -> int:
    return 2 * shape.layers * block_tokens * shape.kv_heads * shape.head_dim * model.config.params_dtype.itemsize


Build = Callable[[GPTModel, ModelShape, float, int, int, int], Engine]


def _build_with_arguments(
    model: GPTModel, shape: ModelShape, kv_cache_gb: float, block_tokens: int, max_requests: int, max_tokens: int
) -> Engine:
    from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import InferenceWrapperConfig

    dtype = model.config.params_dtype
    context = _Context(
        params_dtype=dtype,
        num_layers=shape.layers,
        kv_channels=shape.head_dim,
        num_attention_heads=shape.kv_heads,  # this argument means the heads of the cache
        max_sequence_length=shape.max_positions,
        buffer_size_gb=kv_cache_gb,
        block_size_tokens=block_tokens,
        max_requests=max_requests,
        max_tokens=max_tokens,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        materialize_only_last_token_logits=True,
    )
    settings = InferenceWrapperConfig(
        hidden_size=shape.hidden,
        params_dtype=dtype,
        inference_batch_times_seqlen_threshold=-1,
        padded_vocab_size=model.vocab_size,
        inference_max_requests=max_requests,
        inference_max_seq_length=shape.max_positions,
    )
    controller = _Controller(GPTInferenceWrapper(model, settings, context), _NoText())
    return Engine(controller, context, random_seed=0, enable_chunked_prefill=False)


def _build_with_config(
    model: GPTModel, shape: ModelShape, kv_cache_gb: float, block_tokens: int, max_requests: int, max_tokens: int
) -> Engine:
    from megatron.core.inference.config import InferenceConfig  # pyright: ignore[reportMissingImports]

    settings = InferenceConfig(
        max_sequence_length=shape.max_positions,
        buffer_size_gb=kv_cache_gb,
        block_size_tokens=block_tokens,
        max_requests=max_requests,
        max_tokens=max_tokens,
        materialize_only_last_token_logits=True,
        enable_chunked_prefill=False,
    )
    context = _Context(model.config, settings)
    controller = _Controller(GPTInferenceWrapper(model, context), _NoText())
    return Engine(controller, context)
