"""Self-attention, and attention over packed rows in plain torch, for Megatron's local layers without Transformer Engine."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from async_rl.megatron.attention.context_parallel import RowShards, ShardedPacking
from async_rl.megatron.attention.rope_scaling import attention_factor
from async_rl.megatron.attention.rotary import Rotation
from async_rl.megatron.attention.row_packing import RowPacking
from async_rl.megatron.attention.scores import Scores
from async_rl.megatron.attention.varlen import can_use_varlen, varlen_attention
from async_rl.megatron.compat import (
    AttnMaskType,
    IdentityOp,
    MegatronModule,
    PackedSeqParams,
    SelfAttention,
    TransformerConfig,
)
from async_rl.megatron.layers.norms import Norm
from async_rl.megatron.triton_kernels import has_kernels

WORTHWHILE_PADDING = 2.0
"""Compute sequences as one padded batch if it has at most this many times their tokens."""


class SelfAttentionOfLayer(SelfAttention):
    """Megatron's self-attention with our rotation, and the rotary embedding of its kind of layer.

    Megatron would look up a packed row's angles in every layer, wait for the device, and in some versions rotate sequence by
    sequence.
    """

    _rotation: Rotation | None = None
    """That of the forward pass that runs."""

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: Any = None,
        **kwargs: Any,
    ) -> Any:
        if rotary_pos_emb is not None:
            is_windowed = Scores.of_layer(self.config, self.layer_number).window is not None
            if rotary_pos_emb.shape[-1] > self.hidden_size_per_attention_head:  # see rotary.JoinedRotary
                everywhere, in_window = rotary_pos_emb.chunk(2, dim=-1)
                rotary_pos_emb = in_window if is_windowed else everywhere
            dtype, factor = self.config.params_dtype, attention_factor(self.config)
            if inference_context is not None:
                self._rotation = inference_context.rotation(rotary_pos_emb, dtype, self.config)
            elif isinstance(packed_seq_params, RowPacking):
                self._rotation = packed_seq_params.rotation(is_windowed, rotary_pos_emb, dtype, factor)
            else:
                self._rotation = Rotation.by(rotary_pos_emb, dtype, factor)
        try:
            return super().forward(
                hidden_states,
                *args,
                rotary_pos_emb=None,
                packed_seq_params=packed_seq_params,  # pyright: ignore[reportArgumentType]
                inference_context=inference_context,
                **kwargs,
            )
        finally:
            self._rotation = None

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._rotation is not None and self.uses_kernels(hidden_states.device) and self._has_plain_norms:
            return self._by_kernels(hidden_states, self._rotation)
        heads: Any = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        query, key, *others = heads
        if self._rotation is not None:
            query, key = self._rotation.turn(query), self._rotation.turn(key)
        return query, key, *others

    @staticmethod
    def uses_kernels(device: torch.device) -> bool:
        """Whether heads are normed and rotated by Triton kernels."""
        return has_kernels(device)

    @property
    def _has_plain_norms(self) -> bool:
        """Whether the norms of queries and keys, if there are any, are those that the kernels compute."""
        return {type(self.q_layernorm), type(self.k_layernorm)} <= {Norm, IdentityOp, type(None)}

    def _by_kernels(self, hidden_states: Tensor, rotation: Rotation) -> Any:
        from async_rl.megatron.attention.head_kernels import HeadNorms, query_key_value  # late: not everyone has Triton

        modules: Any = self
        mixed, _ = modules.linear_qkv(hidden_states)
        query, key = modules.q_layernorm, modules.k_layernorm
        return query_key_value(
            mixed,
            rotation,
            HeadNorms(query.weight, key.weight, query.eps) if isinstance(query, Norm) else None,
            groups=self.num_query_groups_per_partition,
            dim=self.hidden_size_per_attention_head,
        )


class PackedAttention(MegatronModule):
    """Causal core attention over packed ("thd") rows and over batches, in plain torch."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__(config)
        refuse_unsupported(config)
        if attention_type != "self" or attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise NotImplementedError(f"PackedAttention does causal self-attention only, not {attention_type} {attn_mask_type}")
        self._scores = Scores.of_layer(config, layer_number, softmax_scale)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> Tensor:
        """[tokens, heads, dim] -> [tokens, heads * dim] when packed; [length, batch, heads, dim] -> [length, batch, heads *
        dim] otherwise.
        """
        if attention_bias is not None:
            raise NotImplementedError("PackedAttention has no attention bias")
        if packed_seq_params is None:
            return self._plain(query, key, value)
        return self._packed(query, key, value, packed_seq_params)

    def _plain(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        return _attend(query, key, value, self._scores).transpose(0, 1).flatten(2)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packing: PackedSeqParams) -> Tensor:
        if isinstance(packing, ShardedPacking) and packing.division is not None:
            return _divided(query, key, value, packing.division, self._scores).flatten(1)
        if can_use_varlen(query):
            return varlen_attention(query, key, value, packing, self._scores).flatten(1)
        lengths = [stop - start for start, stop in pairwise(packing.cu_seqlens_q.tolist())]
        if len(lengths) * max(lengths) <= WORTHWHILE_PADDING * len(query):
            return _padded(query, key, value, packing, self._scores).flatten(1)
        # `split`, not slices: the gradient of a slice has the size of the whole tensor.
        pieces = [
            _attend(q[None], k[None], v[None], self._scores)[0]
            for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        ]
        return torch.cat(pieces).flatten(1)


def refuse_unsupported(config: TransformerConfig) -> None:
    """Raise NotImplementedError for features that these kernels would silently ignore."""
    for name in ("multi_latent_attention", "attention_output_gate"):
        if getattr(config, name, None):
            raise NotImplementedError(f"{name} is not supported by the attention of the local layer spec")
    if getattr(config, "softmax_type", "vanilla") != "vanilla":
        raise NotImplementedError(
            f"softmax_type {config.softmax_type!r} is not supported by the attention of the local layer spec"
        )


def _padded(query: Tensor, key: Tensor, value: Tensor, packing: PackedSeqParams, scores: Scores) -> Tensor:
    """Compute all sequences as one padded batch. Causality keeps tokens from attending to padding at the end."""
    starts, lengths = packing.cu_seqlens_q[:-1].long(), packing.cu_seqlens_q.diff().long()
    offsets = torch.arange(packing.max_seqlen_q, device=query.device)
    places = (starts[:, None] + offsets).clamp_(max=len(query) - 1)
    q, k, v = (tensor.index_select(0, places.flatten()).unflatten(0, places.shape) for tensor in (query, key, value))
    kept = (offsets < lengths[:, None]).flatten().nonzero()[:, 0]
    return _attend(q, k, v, scores).flatten(0, 1).index_select(0, kept)


def _attend(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """[sequences, length, heads, dim] -> same shape. If there are fewer queries than keys, they belong to the last tokens."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    num_queries, num_keys = query.shape[2], key.shape[2]
    window = scores.window if scores.window is not None and scores.window < num_keys else None
    mask = None
    if num_queries < num_keys or window is not None:  # torch's is_causal would align the first query with the first key
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
        mask = mask.triu(num_keys - num_queries - window + 1) if window is not None else mask
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scores.scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def _divided(query: Tensor, key: Tensor, value: Tensor, division: RowShards, scores: Scores) -> Tensor:
    """Attention of this rank's two chunks per sequence, each to the keys and values of all ranks up to its end."""
    keys, values = division.in_order(key), division.in_order(value)
    chunks = 2 * division.group.size()
    own_parts, chunk = division.parts[division.own], division.lengths // chunks
    out = torch.empty_like(query)
    for part in (division.group.rank(), chunks - 1 - division.group.rank()):
        here, seen = (own_parts == part).nonzero()[:, 0], (division.parts <= part).nonzero()[:, 0]
        prefix = _prefixes(chunk, chunk * (part + 1))
        out = out.index_copy(0, here, _attend_to_prefixes(query[here], keys[seen], values[seen], prefix, scores))
    return out


def _prefixes(queries: Tensor, keys: Tensor) -> PackedSeqParams:
    """Boundaries of sequences in which queries are the last `queries` of `keys` tokens."""
    starts = [functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32) for lengths in (queries, keys)]
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts[0],
        cu_seqlens_kv=starts[1],
        max_seqlen_q=int(queries.max()),
        max_seqlen_kv=int(keys.max()),
    )


def _attend_to_prefixes(query: Tensor, key: Tensor, value: Tensor, prefix: PackedSeqParams, scores: Scores) -> Tensor:
    if can_use_varlen(query):  # it aligns the last query with the last key
        return varlen_attention(query, key, value, prefix, scores)
    askers, asked = prefix.cu_seqlens_q.diff().tolist(), prefix.cu_seqlens_kv.diff().tolist()
    pieces = [
        _attend(q[None], k[None], v[None], scores)[0]
        for q, k, v in zip(query.split(askers), key.split(asked), value.split(asked), strict=True)
    ]
    return torch.cat(pieces)
