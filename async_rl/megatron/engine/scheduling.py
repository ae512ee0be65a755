"""Scheduling for megatron-core before 0.17, whose engine neither shares prefixes nor always survives a full cache.

waiting ──▶ a chunk of the prompt per step ──▶ decoding ──▶ ended
   ▲            └ blocks of a known prefix are shared         │
   └───────────────── preempted: no room in the cache ◀───────┘

The caller submits preempted requests again with their tokens so far (EngineStep.preempted).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from async_rl.megatron.engine.dynamic_engine import Context, Engine, KVCacheUsage
from async_rl.megatron.engine.kv_blocks import BlockHash, SharedBlocks, block_hashes
from async_rl.megatron.engine.sending import sent


class SharingContext(Context):  # pyright: ignore[reportGeneralTypeIssues]
    """An inference context with shared blocks."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        own = self.block_allocator
        self.block_allocator = SharedBlocks(self, own.total_count, own.paused_count)

        self._room = np.zeros(0, dtype=np.int64)
        """Places that each row still has in its last block, once `update_requests` was called after its prompt."""
        self._is_continued = False
        """Whether `continue_all` did all the bookkeeping of the last step."""

    def initialize_attention_state(self, **arguments: Any) -> None:
        if self._is_continued and self.is_decode_only():
            self.rotations.clear()
            self._lengthen(self.active_attn_metadata["mha_metadata"].state_data)
        else:
            super().initialize_attention_state(**arguments)
            self.requests: list[int] = self.request_ids[: self.total_request_count].tolist()
        self._is_continued = False

    def _lengthen(self, state: dict[str, Any]) -> None:
        """Attention metadata of a step that differs from the last one by one more token in all requests."""
        lengths = state["kv_seq_lengths"].add_(1)
        torch.cumsum(lengths, 0, dtype=torch.int32, out=state["cu_kv_seq_lengths"][1:])
        state["max_seqlen_k"] += 1
        state["block_table"] = state["block_table"][:]  # another object, because the attention's plan of a step is kept on it

    def update_requests(self, active_requests_mask: Tensor, new_tokens: Tensor) -> None:
        super().update_requests(active_requests_mask, new_tokens)
        offsets = self.request_last_kv_block_offset[: self.total_request_count]
        self._room = self.block_size_tokens - 1 - np.array(offsets.tolist(), dtype=np.int64)

    def continue_all(self, tokens: Tensor) -> bool:
        """What `update_requests` would do with `tokens` if all requests decode and stay. False: they do not.

        It reads nothing from the device.
        """
        if not self.is_decode_only():
            return False
        full = np.flatnonzero(self._room == 0)
        if len(full):
            self._append_blocks(full)
        self._room -= 1
        self._is_continued = True
        rows = slice(self.total_request_count)
        self.token_to_input_ids[rows] = tokens
        for counted in (
            self.request_kv_length_offsets,
            self.request_last_kv_block_offset,
            self.token_to_pos_ids,
            self.token_to_position_in_request,
            self.token_to_local_position_within_kv_block,
        ):
            counted[rows].add_(1)
        return True

    def _append_blocks(self, rows: np.ndarray) -> None:
        """Give these rows another block, which their next token begins. There is room: SchedulingEngine has seen to it."""
        self._room[rows] = self.block_size_tokens
        device = self.request_to_kv_block_ids.device
        at, blocks = sent([rows.tolist(), self.block_allocator.take(len(rows))], torch.int64, device)
        columns, as_stored = self.request_kv_block_counts[at].long(), blocks.int()
        self.request_to_kv_block_ids[at, columns] = as_stored
        self.active_attn_metadata["mha_metadata"].state_data["block_table"][at, columns] = as_stored
        self.request_kv_block_counts[at] = (columns + 1).int()
        self.request_last_kv_block_id[at] = as_stored
        self.token_to_block_idx[at] = blocks
        for place in (self.request_last_kv_block_offset, self.token_to_local_position_within_kv_block):
            place.index_fill_(0, at, -1)  # before the step that `continue_all` adds

    def begin_with(self, request: Any, blocks: Sequence[int]) -> None:
        """Let a request that is about to be added start with cached blocks.

        To Megatron it looks like a request whose prompt was computed up to here in earlier steps: it has a row, and in it a
        token that the next chunk overwrites.
        """
        self.block_allocator.hold(blocks)
        row = self.total_request_count
        self.request_ids[row] = request.request_id
        self.request_to_kv_block_ids[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        self.total_request_count += 1
        self.active_token_count += 1
        request.finished_chunk_token_count = len(blocks) * self.block_size_tokens
        request.remaining_prompt_tokens = request.prompt_tokens[request.finished_chunk_token_count :]

    def drop_last(self) -> None:
        """Take out the request of the last row: a partly computed prompt, with a token that its next chunk would overwrite."""
        self.total_request_count -= 1
        self.active_token_count -= 1
        self._room = self._room[: self.total_request_count]
        with torch.inference_mode():
            self.release_memory_blocks_from_request_indexes(torch.tensor([self.total_request_count]))


@dataclass(slots=True)
class _Prefix:
    """The hashes of a request's blocks."""

    epoch: int
    """Weights that it started with; after a change of weights its blocks are not shared."""
    names: list[BlockHash]
    sampled: list[int] = field(default_factory=list)
    """Tokens whose keys and values are computed, without those of the prompt."""


class SchedulingEngine(Engine):
    context: SharingContext

    def __init__(self, *args: Any, prompt_tokens_per_step: int, reuse_prefixes: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prompt_tokens_per_step = prompt_tokens_per_step
        self._reuse_prefixes = reuse_prefixes
        self._epoch = 0
        """Incremented with every change of weights."""
        self._prefixes: dict[int, _Prefix] = {}
        """By request: the running ones and the next one."""
        self._prefix_tokens_reused = 0
        self._preemptions = 0

    @property
    def memory(self) -> KVCacheUsage:
        blocks = self.context.block_allocator
        return KVCacheUsage(
            blocks=blocks.total_count - 1,
            used=blocks.get_total_used(),
            prefix_tokens_reused=self._prefix_tokens_reused,
            preemptions=self._preemptions,
        )

    def forget_prefixes(self) -> None:
        self._epoch += 1
        self._prefixes = {request: prefix for request, prefix in self._prefixes.items() if request in self.requests}
        self.context.block_allocator.forget()
        if self.context.chunked_prefill_request_id != -1:
            self._restart_partial()

    def _restart_partial(self) -> None:
        """Restart a partly computed prompt, so that all of it is computed with the new weights."""
        context = self.context
        request: Any = self.get_request(context.chunked_prefill_request_id)
        request.remaining_prompt_tokens, request.finished_chunk_token_count = request.prompt_tokens, 0
        context.chunked_prefill_request_id = -1
        context.drop_last()

    def withdraw(self, request: int) -> bool:
        if not super().withdraw(request):
            return False
        self._prefixes.pop(request, None)
        return True

    def advance(self) -> list[int]:
        self.schedule_waiting_requests()
        context = self.context
        context.initialize_attention_state()
        token_ids, positions = context.current_input_and_position_ids()
        logits = self.controller.forward(token_ids, positions)
        requests = context.requests
        tokens = self.controller.sample(logits, requests)
        leaving = self.finished(requests)
        if leaving or not context.continue_all(tokens):
            stays = torch.tensor([request not in leaving for request in requests], dtype=torch.uint8, device=tokens.device)
            # A partly computed prompt, in the last row, has no token yet.
            context.update_requests(stays, functional.pad(tokens, (0, len(requests) - len(tokens))))
        if self._reuse_prefixes:
            for request, token in zip(requests, self.controller.sampler.sampled(), strict=False):
                if request not in leaving:
                    self._prefixes[request].sampled.append(token)
        for request in leaving:
            del self.requests[request]
        return list(leaving)

    # -- before a step --------------------------------------------------------------------------------------------------

    def schedule_waiting_requests(self) -> None:
        budget, context = self._prompt_tokens_per_step, self.context
        while self.waiting_request_ids and budget > 0:
            request: Any = self.get_request(self.waiting_request_ids[0])
            if request.request_id != context.chunked_prefill_request_id and not self._has_entered(request):
                return
            chunk = min(budget, request.remaining_prompt_length)
            budget -= chunk
            is_partial = chunk < request.remaining_prompt_length
            context.chunked_prefill_request_id = request.request_id if is_partial else -1
            context.add_request(request, chunk)
            request.remaining_prompt_tokens = request.remaining_prompt_tokens[chunk:]
            request.finished_chunk_token_count += chunk
            # Shared at once: every layer writes keys and values before a request of the same step reads them.
            prefix = self._prefixes[request.request_id]
            self._name_blocks(prefix, context.total_request_count - 1, request.finished_chunk_token_count)
            if not is_partial:
                self.waiting_request_ids.popleft()

    def _has_entered(self, request: Any) -> bool:
        """Admit a request if there is a row, and blocks for its prompt and the next block of all requests."""
        context, blocks, length = self.context, self.context.block_allocator, len(request.prompt_tokens)
        running = context.total_request_count
        if running == context.max_requests:
            return False
        prefix = self._prefix_of(request)
        # The last prompt token is always computed, because sampling needs its logits.
        shared = blocks.find(prefix.names[: (length - 1) // context.block_size_tokens])
        needed = -(-length // context.block_size_tokens) - len(shared) + blocks.idle_among(shared)
        next_blocks = running + 1 if running else 0
        if needed + next_blocks > blocks.total_avail:
            return False
        if shared:
            context.begin_with(request, shared)
            self._prefix_tokens_reused += len(shared) * context.block_size_tokens
        return True

    def _prefix_of(self, request: Any) -> _Prefix:
        prefix = self._prefixes.get(request.request_id)
        if prefix is None or prefix.epoch != self._epoch:
            tokens = request.prompt_tokens.tolist() if self._reuse_prefixes else []
            prefix = _Prefix(self._epoch, block_hashes(tokens, self.context.block_size_tokens))
            self._prefixes[request.request_id] = prefix
        return prefix

    def _name_blocks(self, prefix: _Prefix, row: int, computed: int) -> None:
        if prefix.names:
            full = computed // self.context.block_size_tokens
            blocks = self.context.request_to_kv_block_ids[row, :full].tolist()
            self.context.block_allocator.name(blocks, prefix.names)

    # -- after sampling, before Megatron removes ended requests -----------------------------------------------------

    def finished(self, requests: list[int]) -> set[int]:
        leaving = super().finished(requests)
        rows = dict(zip(requests, range(len(requests)), strict=True))
        for request in leaving:
            self._release(request, rows.pop(request))
        while self._blocks_needed(rows) > self.context.block_allocator.total_avail:
            youngest = max(rows)
            self._release(youngest, rows.pop(youngest))
            self.preempted.append(youngest)
            self._preemptions += 1
            leaving.add(youngest)
            if youngest == self.context.chunked_prefill_request_id:
                self.context.chunked_prefill_request_id = -1
                self.waiting_request_ids.popleft()
        return leaving

    def _blocks_needed(self, rows: Mapping[int, int]) -> int:
        """Blocks needed for the next token of all requests and the rest of a partly computed prompt."""
        context, partial = self.context, self.context.chunked_prefill_request_id
        promised = 0
        if partial != -1:
            request: Any = self.get_request(partial)
            held = -(-request.finished_chunk_token_count // context.block_size_tokens)
            promised = -(-len(request.prompt_tokens) // context.block_size_tokens) - held
        if promised + len(rows) <= context.block_allocator.total_avail:
            return 0  # enough even if all need a block
        is_full = (context.request_last_kv_block_offset == context.block_size_tokens - 1).tolist()
        return promised + sum(is_full[row] for request, row in rows.items() if request != partial)

    def _release(self, request: int, row: int) -> None:
        """Release a request's blocks before Megatron does; hashed ones stay cached."""
        prefix = self._prefixes.pop(request)
        if self._reuse_prefixes and prefix.epoch == self._epoch and request != self.context.chunked_prefill_request_id:
            known: Any = self.get_request(request)
            # Without the token just sampled, whose keys and values are not computed yet.
            computed = [*known.prompt_tokens.tolist(), *prefix.sampled]
            prefix.names = block_hashes(computed, self.context.block_size_tokens, prefix.names)
            self._name_blocks(prefix, row, len(computed))
        self.context.release_memory_blocks_from_request_indexes(torch.tensor([row]))
