"""Megatron's dynamic inference engine, seen alike in all supported versions: submit, step, withdraw, clear."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from async_rl.megatron import host

with host.importing():
    from megatron.core.inference import utils as inference_utils
    from megatron.core.inference.contexts import DynamicInferenceContext
    from megatron.core.inference.engines import DynamicInferenceEngine
    from megatron.core.inference.sampling_params import SamplingParams
    from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController


class Sampler(Protocol):
    """Turns logits into tokens, and decides who is done. Both are called once per engine step, in this order."""

    def sample(self, logits: Tensor, requests: Sequence[int]) -> Tensor:
        """One token per row of logits [requests, vocabulary]; `requests` are their ids."""
        ...

    def finished(self, requests: Sequence[int]) -> set[int]:
        """Which of the requests that were just sampled for end with that token."""
        ...


class NullTokenizer:
    """The engine speaks token ids only; Megatron detokenizes what is finished and asks for an end token."""

    eod = -1
    bos = None

    def detokenize(self, *_: object, **__: object) -> str:
        return ""


class _Limit(SamplingParams):
    """All that Megatron is told of a request. Nobody shares or changes it: the copies that Megatron makes are for nothing."""

    def __deepcopy__(self, memo: object) -> _Limit:
        return self


class Context(DynamicInferenceContext):  # pyright: ignore[reportGeneralTypeIssues]
    """Without CUDA graphs nothing gains from rounding up the number of tokens or requests of a step."""

    TOKEN_ROUNDER = 1
    REQUEST_ROUNDER = 1


class Controller(TextGenerationController):
    """Leaves sampling to our sampler: one call for all requests, log-probabilities of the distribution sampled from."""

    sampler: Sampler
    vocab_size: int

    def _dynamic_step_sample_bookkeeping(self) -> None: ...

    def _dynamic_step_sample_logits(self, logits: Tensor | None = None) -> None:
        context: Any = self.inference_wrapped_model.inference_context
        requests = _complete(context, context.request_ids[context.paused_request_count : context.total_request_count].tolist())
        # Some versions pass the logits, others leave them here.
        logits = logits if logits is not None else self._all_logits_cuda  # pyright: ignore[reportAttributeAccessIssue]
        # Tensor ranks pad the vocabulary to equal parts; nobody may sample what is only padding.
        tokens = self.sampler.sample(logits[0, : len(requests), : self.vocab_size], requests)
        self._sampled_tokens_cuda[: len(requests)] = tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The KV cache, and what was done to make do with it."""

    blocks: int
    used: int
    """By requests that run."""
    prefix_tokens_reused: int
    preemptions: int


class Engine(DynamicInferenceEngine):  # pyright: ignore[reportGeneralTypeIssues]  # a decorator hides the class
    """Has an event loop of its own, where Megatron would share one between all engines of the process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self.preempted: list[int] = []
        """Requests that gave up their place in this step; whoever submitted them does it again."""
        super().__init__(*args, **kwargs)

    def advance(self) -> list[int]:
        """One forward pass for everybody that has room; returns the requests that are gone."""
        outcome = self._loop.run_until_complete(self.async_step())
        return [record.request_id for record in outcome["finished_request_records"]]

    def finished(self, requests: list[int]) -> set[int]:
        """Called with everybody who was in the step, once tokens are sampled: who leaves?"""
        return self.controller.sampler.finished(_complete(self.context, requests))

    def forget_prefixes(self) -> None:
        """Other weights: nobody may begin with keys and values of the old ones."""
        raise NotImplementedError

    @property
    def memory(self) -> Memory:
        raise NotImplementedError

    def withdraw(self, request: int) -> bool:
        """Take back a request that still waits. False if it runs already: then the sampler must end it."""
        if request not in self.waiting_request_ids or request == self.context.chunked_prefill_request_id:
            return False
        self.waiting_request_ids.remove(request)
        del self.requests[request]
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    ended: Sequence[int]
    preempted: Sequence[int]
    """Left for want of room, oldest first. They continue when they are submitted again with what they have so far."""


def submit(engine: Engine, request: int, tokens: Sequence[int], max_tokens: int, *, first: bool = False) -> None:
    """Queue a request; the engine takes it in as soon as it has room. `first` puts it before those that wait."""
    engine.add_request(request, list(tokens), _Limit(num_tokens_to_generate=max_tokens, termination_id=-1))
    if first:
        waiting = engine.waiting_request_ids
        waiting.remove(request)
        # Megatron wants the prompt that it has begun to compute at the head.
        waiting.insert(int(engine.context.chunked_prefill_request_id != -1), request)


def step(engine: Engine) -> EngineStep:
    """One forward pass for everybody that has room."""
    with torch.inference_mode():
        left = engine.advance()
    preempted, engine.preempted = sorted(engine.preempted), []
    return EngineStep(ended=[request for request in left if request not in preempted], preempted=preempted)


def clear(engine: Engine) -> None:
    """Drop all requests and everything that was computed for them."""
    with torch.inference_mode():
        engine.context.reset()
    engine.requests.clear()
    engine.waiting_request_ids.clear()
    engine.forget_prefixes()


def retire(engine: Engine) -> None:
    """Leave nothing of the engine behind: neither its event loop nor Megatron's process-wide inference flag."""
    while tasks := asyncio.all_tasks(engine._loop):
        engine._loop.run_until_complete(asyncio.wait(tasks))
    engine._loop.close()
    if mode := getattr(inference_utils, "InferenceMode", None):
        mode.unset_active()


def _complete(context: Any, requests: list[int]) -> list[int]:
    """Those whose whole prompt was computed; Megatron samples for the other one too, which means nothing."""
    return [request for request in requests if request != context.chunked_prefill_request_id]
