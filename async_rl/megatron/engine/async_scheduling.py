"""Asynchronous scheduling of megatron-core 0.19: the next decode step is launched before the host has the tokens of the last.

device   step n ─▶ sample ─▶ step n + 1 ─────────────▶ sample ─▶ ...
host     prepare n + 1 ─▶ launch ─▶ wait for the tokens of n, end what ends, deliver ─▶ prepare n + 2 ─▶ ...

Rows of generations that ended in step n were computed in vain in step n + 1, and are not sampled. Steps with prompts, and those
that need blocks of others, wait for the tokens as usual.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from async_rl.megatron.engine.dynamic_engine import Controller

# The installed release may have none of what is extended here.
# pyright: reportAttributeAccessIssue=false


class AsyncController(Controller):
    """Samples without waiting, and brings the tokens to the host when Megatron waits for them."""

    def _copy_async_sched_sample_to_cpu(self, sampled: Tensor, *_: Any) -> tuple[Tensor, None, None, _Arrival]:
        # The sampler sends tokens itself, with their log-probabilities.
        tokens = torch.zeros(len(sampled), dtype=sampled.dtype)
        return tokens, None, None, _Arrival(lambda: tokens.copy_(self.sampled(len(tokens))))

    def _run_async_sched_prepare(self) -> tuple[Tensor, Tensor]:
        # It writes the books, which may still be on their way to the device.
        context: Any = self.inference_wrapped_model.inference_context
        if context.bookkeeping_sent is not None:
            context.bookkeeping_sent.synchronize()
        return super()._run_async_sched_prepare()

    def _build_async_sched_request_state(self, *args: Any) -> Any:
        # A prompt whose next chunk had no room was not in this step: Megatron has it behind the rows of the step, and
        # would look for it among them.
        context: Any = self.inference_wrapped_model.inference_context
        partial, rows = context.chunked_prefill_request_id, slice(context.paused_request_count, context.total_request_count)
        is_hidden = partial != -1 and partial not in context.request_ids[rows].tolist()
        try:
            context.chunked_prefill_request_id = -1 if is_hidden else partial
            return super()._build_async_sched_request_state(*args)
        finally:
            context.chunked_prefill_request_id = partial

    def drop_logits(self) -> None:
        self._async_sched_logits.clear()


class _Arrival:
    """Stands in for the event that Megatron synchronizes before it reads sampled tokens."""

    def __init__(self, read: Callable[[], object]) -> None:
        self.synchronize = read


def async_schedule_mode() -> Any:
    """The value of Megatron's setting; None if this release has none."""
    if importlib.util.find_spec("megatron.core.inference.config") is None:
        return None
    from megatron.core.inference import config  # pyright: ignore[reportMissingImports]

    modes: Any = getattr(config, "AsyncScheduleMode", None)
    return modes.ASYNC if modes is not None else None
