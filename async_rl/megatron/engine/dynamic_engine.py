"""A uniform interface to the dynamic inference engines of all supported Megatron versions: submit, step, withdraw, clear."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from async_rl.megatron import host
from async_rl.megatron.attention.rope_scaling import attention_factor
from async_rl.megatron.attention.rotary import Rotation
from async_rl.megatron.compat import TransformerConfig
from async_rl.megatron.engine.decode_graphs import DecodeGraphs
from async_rl.megatron.engine.decode_step import DecodeInputs

with host.importing():
    from megatron.core.inference import utils as inference_utils
    from megatron.core.inference.contexts import DynamicInferenceContext
    from megatron.core.inference.engines import DynamicInferenceEngine
    from megatron.core.inference.sampling_params import SamplingParams
    from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController


class Sampler(Protocol):
    """Samples tokens and decides which requests end. `sample` and `finished` are called once per engine step, in this order."""

    version: int
    """That of the engine's weights."""

    def sample(self, logits: Tensor, requests: Sequence[int], *, version: int) -> Tensor:
        """Sample one token per row of logits [requests, vocabulary]; `requests` are their ids, and `version` that of the
        weights which computed them. Returns the tokens on the device, without waiting for it.
        """
        ...

    def sampled(self) -> list[int]:
        """The tokens just sampled, once the device has sent them. Nothing else has to wait for the device."""
        ...

    def finished(self, requests: Sequence[int]) -> set[int]:
        """The requests that end with the token just sampled."""
        ...


class NullTokenizer:
    """Stands in for the tokenizer that Megatron requires; the engine uses token ids only."""

    eod = -1
    bos = None

    def detokenize(self, *_: object, **__: object) -> str:
        return ""


class _Limit(SamplingParams):
    """Parameters of a request for Megatron. Never modified, so deep copies are skipped."""

    def __deepcopy__(self, memo: object) -> _Limit:
        return self


class Context(DynamicInferenceContext):  # pyright: ignore[reportGeneralTypeIssues]
    """Without rounding of tokens and requests per step, which only CUDA graphs need. Rotates all layers of a step alike."""

    TOKEN_ROUNDER = 1
    REQUEST_ROUNDER = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.rotations: dict[int, Rotation] = {}
        """Rotations of the tokens of this step, for each of the model's two kinds of layers."""
        self.bookkeeping_sent: Any = None
        """Event of the copy of the last bookkeeping to the device, if Megatron keeps its books on the host."""
        self.prompt_keys = 0
        """Upper bound of the keys that prompts read in the last step that had any: tokens computed times prompt length."""
        super().__init__(*args, **kwargs)

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        if self.is_decode_only():  # the first prompt of a step
            self.prompt_keys = 0
        before = self.active_token_count
        super().add_request(request, *args, **kwargs)
        self.prompt_keys += (self.active_token_count - before) * len(request.prompt_tokens)

    def initialize_attention_state(self, **arguments: Any) -> Any:
        self.rotations.clear()
        return super().initialize_attention_state(**arguments)

    def rotation(self, angles: Tensor, dtype: torch.dtype, config: TransformerConfig) -> Rotation:
        """Return the rotation of this step's tokens, from the angles of all positions."""
        kind = int(angles.storage_offset())  # the angles of the two kinds of layers lie side by side
        if kind not in self.rotations:
            on_device: Any = getattr(self, "gpu_view", self)  # some versions keep their books on the host
            positions = on_device.token_to_pos_ids[: self.padded_active_token_count]
            self.rotations[kind] = Rotation.by(angles[positions], dtype, attention_factor(config))
        return self.rotations[kind]

    def transfer_bookkeeping_to_gpu(self, *args: Any, record_done_event: bool = False, **kwargs: Any) -> Any:
        """Send the bookkeeping without waiting. It is written again only after the tokens of this step have arrived, or with
        asynchronous scheduling after `bookkeeping_sent`.
        """
        self.bookkeeping_sent = super().transfer_bookkeeping_to_gpu(*args, record_done_event=True, **kwargs)
        return self.bookkeeping_sent

    def last_token_logits(self, logits: Tensor) -> Tensor:
        # A step that only decodes has no other tokens than the last ones.
        return logits[0] if self.is_decode_only() else super().last_token_logits(logits)


class Controller(TextGenerationController):
    """Delegates sampling to our sampler, with one call for all requests."""

    sampler: Sampler
    vocab_size: int
    graphs: DecodeGraphs | None = None
    """For the steps in which all requests decode, or prompts are short; None: they run as the others do."""

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Logits [1, requests, vocabulary] of the step that the context was made ready for."""
        context: Any = self.inference_wrapped_model.inference_context
        self._version = self.sampler.version
        tokens = token_ids[0]
        if self.graphs is not None and (context.is_decode_only() or self.graphs.fits(len(tokens), context.prompt_keys)):
            state = context.active_attn_metadata["mha_metadata"].state_data
            starts, lengths, blocks = state["cu_query_seq_lengths"], state["kv_seq_lengths"], state["block_table"]
            inputs = DecodeInputs.of_step(tokens, starts, lengths, blocks)
            return self.graphs.run(inputs, longest=state["max_seqlen_k"])[None]
        model = self.inference_wrapped_model.model
        return model(token_ids, positions, None, inference_context=context, runtime_gather_output=True)

    def _dynamic_step_forward_logits(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        logits = self._all_logits_cuda = self.forward(input_ids, position_ids)  # some versions return it, others store it
        return logits

    def _dynamic_step_sample_bookkeeping(self) -> None: ...

    def _dynamic_step_sample_logits(self, logits: Tensor | None = None) -> None:
        context: Any = self.inference_wrapped_model.inference_context
        requests = context.request_ids[context.paused_request_count : context.total_request_count].tolist()
        # Some versions pass the logits, others store them here.
        logits = logits if logits is not None else self._all_logits_cuda  # pyright: ignore[reportAttributeAccessIssue]
        tokens = self.sample(logits, requests)
        self._sampled_tokens_cuda[: len(tokens)] = tokens

    def _transfer_samples_to_cpu(self, active_request_count: int) -> tuple[Tensor, None]:
        return self.sampled(active_request_count), None

    def sampled(self, requests: int) -> Tensor:
        """The tokens just sampled, for so many requests: a partly computed prompt, in the last row, has no token yet."""
        tokens = self.sampler.sampled()
        return torch.tensor(tokens + [0] * (requests - len(tokens)))

    def drop_logits(self) -> None:
        """Forget what the last forward pass computed, if nothing was sampled from it."""

    def sample(self, logits: Tensor, requests: list[int]) -> Tensor:
        """Sample a token for each of the requests of the step whose prompt is complete."""
        complete = _complete(self.inference_wrapped_model.inference_context, requests)
        # The vocabulary is padded for tensor ranks; padding must not be sampled.
        return self.sampler.sample(logits[0, : len(complete), : self.vocab_size], complete, version=self._version)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheUsage:
    """Use of the KV cache."""

    blocks: int
    used: int
    """Blocks held by running requests."""
    prefix_tokens_reused: int
    preemptions: int


_living: WeakSet[Engine] = WeakSet()
"""The engines of this process. Since 0.17 Megatron has one flag for all of them, which each sets when it is built."""
_living_lock = threading.Lock()


class Engine(DynamicInferenceEngine):  # pyright: ignore[reportGeneralTypeIssues]  # a decorator hides the class
    """An engine with its own event loop; Megatron would share one among all engines of the process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self.preempted: list[int] = []
        """Requests preempted in this step, which must be submitted again."""
        with _living_lock:
            _living.add(self)
        super().__init__(*args, **kwargs)

    def advance(self) -> list[int]:
        """Run one forward pass; returns the requests that left the engine."""
        outcome = self._loop.run_until_complete(self.async_step())
        return [record.request_id for record in outcome["finished_request_records"]]

    def finished(self, requests: list[int]) -> set[int]:
        """Called by Megatron after sampling with the requests of the step; returns those that end."""
        return self.controller.sampler.finished(_complete(self.context, requests))

    def forget_prefixes(self) -> None:
        """Drop cached prefixes, because the weights changed."""
        raise NotImplementedError

    @property
    def memory(self) -> KVCacheUsage:
        raise NotImplementedError

    def withdraw(self, request: int) -> bool:
        """Remove a waiting request. Returns False if it runs already; then the sampler must end it."""
        if request not in self.waiting_request_ids or request == self.context.chunked_prefill_request_id:
            return False
        self.waiting_request_ids.remove(request)
        del self.requests[request]
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    ended: Sequence[int]
    preempted: Sequence[int]
    """Requests preempted for lack of KV blocks, oldest first. Submit them again with their tokens so far to continue."""


def submit(engine: Engine, request: int, tokens: Sequence[int], max_tokens: int, *, first: bool = False) -> None:
    """Queue a request; `first` puts it at the head of the queue."""
    engine.add_request(request, list(tokens), _Limit(num_tokens_to_generate=max_tokens, termination_id=-1))
    if first:
        waiting = engine.waiting_request_ids
        waiting.remove(request)
        # Megatron requires a partly computed prompt at the head.
        waiting.insert(int(engine.context.chunked_prefill_request_id != -1), request)


def step(engine: Engine) -> EngineStep:
    """Run one forward pass."""
    with torch.inference_mode():
        left = engine.advance()
    preempted, engine.preempted = sorted(engine.preempted), []
    return EngineStep(ended=[request for request in left if request not in preempted], preempted=preempted)


def clear(engine: Engine) -> None:
    """Drop all requests and the KV cache."""
    with torch.inference_mode():
        engine.context.reset()
    engine.controller.drop_logits()
    engine.requests.clear()
    engine.waiting_request_ids.clear()
    engine.forget_prefixes()


def retire(engine: Engine) -> None:
    """Close the engine's event loop. With the last engine of the process, Megatron's flag of inference goes too."""
    while tasks := asyncio.all_tasks(engine._loop):
        engine._loop.run_until_complete(asyncio.wait(tasks))
    engine._loop.close()
    with _living_lock:
        _living.discard(engine)
        if not _living and (mode := getattr(inference_utils, "InferenceMode", None)):
            mode.unset_active()


def _complete(context: Any, requests: list[int]) -> list[int]:
    """Requests whose whole prompt was computed. Megatron also samples for a partly computed one, which is ignored."""
    partial = context.chunked_prefill_request_id
    return requests if partial == -1 else [request for request in requests if request != partial]
