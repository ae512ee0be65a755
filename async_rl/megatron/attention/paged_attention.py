"""Paged attention of the inference engine, and the choice of its kernel.

Replaces Megatron's method, which needs FlashAttention: by a Triton kernel on GPUs, by plain torch on a CPU.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor

from async_rl.errors import ConfigError
from async_rl.megatron.attention.gathered_pages import gathered_attention
from async_rl.megatron.attention.scores import Scores
from async_rl.megatron.attention.self_attention import SelfAttentionOfLayer
from async_rl.megatron.compat import HAVE_FLASH_ATTENTION, attention_module
from async_rl.megatron.triton_kernels import has_triton
from async_rl.models.shape import ModelShape

Kernels = Literal["auto", "triton", "torch"]

FLASH_PAGE = 256
"""FlashAttention 2 reads pages of a multiple of this many tokens."""


class PagedSelfAttention(SelfAttentionOfLayer):
    """Self-attention with a paged kernel that does not need FlashAttention."""

    kernel: str
    """Its name, for the log."""

    @staticmethod
    @abstractmethod
    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        starts: Tensor,
        *,
        longest: int,
        scale: float | None,
        window: int | None,
        is_decode_only: bool,
    ) -> Tensor:
        """See paged_kernels.paged_attention."""

    def flash_decode_and_prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        seqlens_k: Tensor,
        block_table: Tensor,
        is_decode_only: bool,
        softmax_offset: Tensor | None = None,
    ) -> Tensor:
        """q [tokens, 1, heads, dim]; k, v [pages, page, kv heads, dim]; returns like q."""
        if softmax_offset is not None:
            raise NotImplementedError("softmax_offset (attention sinks) is not supported by the paged attention")
        if q.shape[1] != 1:
            raise NotImplementedError("several query tokens per decoding request (speculation) are not supported")
        scores = Scores.of_layer(self.config, self.layer_number, self.config.softmax_scale)
        out = self.attend(
            q[:, 0],
            k,
            v,
            block_table,
            seqlens_k,
            cu_seqlens_q,
            longest=max_seqlen_k,
            scale=scores.scale,
            window=scores.window,
            is_decode_only=is_decode_only,
        )
        return out[:, None]


class GatheringSelfAttention(PagedSelfAttention):
    kernel = "torch gather"

    @staticmethod
    def uses_kernels(device: torch.device) -> bool:
        return False

    attend = staticmethod(gathered_attention)


class TritonSelfAttention(PagedSelfAttention):
    kernel = "triton"

    @staticmethod
    def uses_kernels(device: torch.device) -> bool:
        return True  # on a CPU, in Triton's interpreter

    @staticmethod
    def attend(*args: Tensor, **options: Any) -> Tensor:
        from async_rl.megatron.attention.paged_kernels import paged_attention  # late: not everyone has Triton

        return paged_attention(*args, **options)


def attention_for(
    device: torch.device, shape: ModelShape, page: int, kernels: Kernels = "auto", *, may_be_flash: bool = True
) -> type[SelfAttentionOfLayer]:
    """The attention class for pages of that many tokens on a device. Raises ConfigError as `uses_triton` does.

    It keeps Megatron's paged attention where FlashAttention is installed, can read the pages and compute the model, and
    `may_be_flash`.
    """
    is_plain = shape.window is None and shape.query_scalar is None
    if (
        may_be_flash
        and kernels == "auto"
        and device.type == "cuda"
        and HAVE_FLASH_ATTENTION
        and page % FLASH_PAGE == 0
        and is_plain
    ):
        return SelfAttentionOfLayer
    # Megatron asserts FlashAttention before it calls the method that we replace.
    attention_module.HAVE_FA3 = True
    return TritonSelfAttention if uses_triton(device, kernels) else GatheringSelfAttention


def uses_triton(device: torch.device, kernels: Kernels) -> bool:
    """Whether the engine's kernels are those in Triton. Raises ConfigError if they are wanted and cannot run."""
    if kernels == "torch":
        return False
    if kernels == "triton" and not (has_triton() and (device.type == "cuda" or _interprets())):
        raise ConfigError("worker.kernels: triton needs a GPU and the package triton; auto chooses by device")
    return has_triton() and (device.type == "cuda" or kernels == "triton")


def _interprets() -> bool:
    """Whether Triton interprets kernels on the CPU (TRITON_INTERPRET=1), as tests do."""
    from triton import knobs

    return knobs.runtime.interpret


def kernel_name(attention: type[SelfAttentionOfLayer]) -> str:
    return attention.kernel if issubclass(attention, PagedSelfAttention) else "flash-attention"
