"""A forward pass in which every row is one token of a request, as a function of four tensors: start with `DecodeStep`.

A request that decodes has one row, a prompt one for each token: all keys of a layer are written before attention reads them,
and the length of a row hides those of later tokens.

Nothing in it depends on numbers of the host, and the host waits for nothing, so a CUDA graph can hold it. Megatron's own
bookkeeping is left out: the model asks `_DecodeContext` instead of the engine's context, which needs the tensors alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from async_rl.megatron import host
from async_rl.megatron.attention.rope_scaling import attention_factor
from async_rl.megatron.attention.rotary import Rotation
from async_rl.megatron.compat import TransformerConfig

with host.importing():
    from megatron.core.inference.contexts import dynamic_context


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What a step is computed from; a row for each token."""

    tokens: Tensor
    """[rows] int64"""
    lengths: Tensor
    """[rows] int32: tokens of its request in the KV cache up to this one, once it is written. 0: only padding."""
    blocks: Tensor
    """[rows, blocks of the longest sequence] int32: its request's blocks in the KV cache."""
    last: Tensor
    """[requests] int32: the row of each request's last token, whose logits are wanted."""

    @classmethod
    def empty(cls, rows: int, requests: int, columns: int, device: torch.device) -> DecodeInputs:
        return cls(
            tokens=torch.zeros(rows, dtype=torch.int64, device=device),
            lengths=torch.zeros(rows, dtype=torch.int32, device=device),
            blocks=torch.zeros((rows, columns), dtype=torch.int32, device=device),
            last=torch.zeros(requests, dtype=torch.int32, device=device),
        )

    @classmethod
    def of_step(cls, tokens: Tensor, starts: Tensor, lengths: Tensor, blocks: Tensor) -> DecodeInputs:
        """Those of a step in which request r has the tokens `starts[r]` to `starts[r + 1]`, the last of its `lengths[r]`."""
        if len(tokens) == len(lengths):  # all have one
            return cls(tokens, lengths, blocks, starts[:-1])
        stops = starts[1:]
        row = torch.arange(len(tokens), dtype=stops.dtype, device=stops.device)
        request = torch.searchsorted(stops, row, right=True)
        return cls(tokens, lengths[request] - (stops[request] - 1 - row), blocks[request], stops - 1)

    def first(self, rows: int) -> DecodeInputs:
        """The same memory, fewer rows, and no more requests than these."""
        return DecodeInputs(self.tokens[:rows], self.lengths[:rows], self.blocks[:rows], self.last[:rows])


class DecodeStep:
    """Logits [requests, vocabulary] of a model whose keys and values are in the cache of a Megatron engine's context."""

    def __init__(self, model: nn.Module, engine_context: Any) -> None:
        blocks: Any = getattr(engine_context, "kv_block_allocator", None) or engine_context.block_allocator
        self._model = model
        self._engine_context = engine_context
        # a model of experts has tens of thousands of modules: they are found once, and asked for the tensors that they have
        self._holders = [each for module in model.modules() for each in (module._parameters, module._buffers) if each]
        self._of_step = partial(
            _DecodeContext,
            unused_block=int(blocks.dummy_block_idx),
            context_tokens=engine_context.max_sequence_length,
            angles_read={},
        )

    def __call__(self, inputs: DecodeInputs, longest: int) -> Tensor:
        """`longest` bounds `inputs.lengths`."""
        context = self._of_step(inputs, longest, cache=self._engine_context.memory_buffer)
        tokens, positions = inputs.tokens[None], context.positions[None]
        return self._model(tokens, positions, None, inference_context=context, runtime_gather_output=True)[0]

    def addresses(self) -> tuple[int, ...]:
        """Where everything lies that a captured step reads besides its inputs."""
        held = [tensor.data_ptr() for holder in self._holders for tensor in holder.values() if tensor is not None]
        return (*held, self._engine_context.memory_buffer.data_ptr())


class _DecodeContext:
    """What a model asks of Megatron's inference context during one forward pass."""

    use_flashinfer_fused_rope = False
    num_speculative_tokens = 0
    materialize_only_last_token_logits = True
    config = SimpleNamespace(materialize_only_last_token_logits=True)
    padding_slice = slice(0, 0)

    def __init__(
        self,
        inputs: DecodeInputs,
        longest: int,
        *,
        cache: Tensor,
        unused_block: int,
        context_tokens: int,
        angles_read: dict[int, Tensor],
    ) -> None:
        """`cache`: [keys or values, layers, blocks, tokens, heads, dim]. Padding is written to `unused_block`. Tables of angles
        are kept in `angles_read`, because Megatron only caches them, and a graph reads them wherever they were.
        """
        self.max_sequence_length = context_tokens
        self._angles_read = angles_read
        self.positions = (inputs.lengths - 1).clamp_(min=0).long()
        self._inputs = inputs
        self._longest = longest
        self._cache = cache
        page = cache.shape[3]
        own = inputs.blocks.gather(1, (self.positions // page)[:, None])[:, 0].long()
        self._block = torch.where(inputs.lengths > 0, own, unused_block)
        self._place = self.positions % page
        self._starts = torch.arange(len(inputs.lengths) + 1, dtype=torch.int32, device=cache.device)
        self._rotations: dict[int, Rotation] = {}

    def is_static_batching(self) -> bool:
        return False

    def is_dynamic_batching(self) -> bool:
        return True

    def is_decode_only(self) -> bool:
        return True

    def using_cuda_graph_this_step(self) -> bool:
        """Whether Megatron's own graphs run."""
        return False

    def append_key_value_cache(self, layer_number: int, key: Tensor, value: Tensor) -> None:
        layer = layer_number - 1
        if (append := dynamic_context.triton_append_key_value_cache) is not None and key.is_cuda:
            append(layer, key, value, self._cache, len(self._block), self._block, self._place)
            return
        for kind, heads in enumerate((key, value)):
            self._cache[kind, layer].index_put_((self._block, self._place), heads[:, 0])

    def key_value_cache(self, layer_number: int) -> tuple[Tensor, Tensor, Tensor]:
        return self._cache[0, layer_number - 1], self._cache[1, layer_number - 1], self._inputs.blocks

    def cu_query_lengths(self) -> tuple[Tensor, int]:
        return self._starts, 1

    def cu_kv_lengths(self) -> tuple[Tensor, Tensor, int]:
        # The first is for kernels that our attention does not use.
        return self._starts, self._inputs.lengths, self._longest

    def last_token_logits(self, hidden: Tensor) -> Tensor:
        # Where all decode it copies every row, which takes microseconds of milliseconds: one set of graphs serves all steps.
        return hidden[0].index_select(0, self._inputs.last)

    def rotation(self, angles: Tensor, dtype: torch.dtype, config: TransformerConfig) -> Rotation:
        kind = int(angles.storage_offset())  # the angles of the two kinds of layers lie side by side
        if kind not in self._rotations:
            self._angles_read[angles.data_ptr()] = angles
            self._rotations[kind] = Rotation.by(angles[self.positions], dtype, attention_factor(config))
        return self._rotations[kind]
