"""Tries the kernels that training and decoding are built on, one by one: which work here, how exact, how fast.

A kernel that does not work is a figure, `no (...)`, and not a failure: each has something that takes its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from async_rl.megatron.attention.scores import Scores
from async_rl.megatron.attention.varlen import flash_attention_4, torch_varlen, varlen_kernel
from async_rl.megatron.compat import PackedSeqParams
from async_rl.megatron.layers.swiglu import FusedSwiglu
from async_rl.megatron.model import packed_params
from gpu_checks.ceilings import seconds_of
from gpu_checks.report import Checks, Machine, Report

LENGTHS = (64, 1, 300, 30)
HEADS, KV_HEADS = 16, 8


def varlen(machine: Machine, report: Report) -> None:
    """Variable-length attention, torch's and FlashAttention 4: distance from float32 forward and backward, and speed."""
    for dim in (32, 64, 128):
        report.attempt(f"forward_distance_{dim}", lambda dim=dim: _distance_of(torch_varlen, "", machine, dim, report))
    report.attempt("takes_fewer_key_heads", lambda: _fewer_key_heads(machine))
    for sequences in (4, 32):
        report.attempt(f"ms_8k_tokens_{sequences}_sequences", lambda count=sequences: _varlen_ms(torch_varlen, machine, count))
    flash = flash_attention_4(machine.device, torch.bfloat16, HEADS, KV_HEADS, 128) if machine.is_gpu else None
    report.note(runs_use_flash_attention_4="yes" if flash is not None else "no")
    if flash is not None:
        report.attempt("flash_4_forward_distance_128", lambda: _distance_of(flash, "flash_4_", machine, 128, report))
        report.attempt("flash_4_ms_8k_tokens_4_sequences", lambda: _varlen_ms(flash, machine, 4))


def _distance_of(kernel: Callable[..., Tensor], name: str, machine: Machine, dim: int, report: Report) -> float:
    packing, (query, key, value) = _packed(LENGTHS, machine), _heads(sum(LENGTHS), dim, machine)
    own = [each.detach().requires_grad_() for each in (query, key, value)]
    precise = [each.detach().float().requires_grad_() for each in (query, key, value)]
    found = kernel(*own, packing, Scores())
    expected = torch.cat([_alone(*each) for each in zip(*(tensor.split(LENGTHS) for tensor in precise), strict=True)])
    direction = torch.randn_like(expected)
    (found.float() * direction).sum().backward()
    (expected * direction).sum().backward()
    report.note(**{f"{name}backward_distance_{dim}": max(_distance(a.grad, b.grad) for a, b in zip(own, precise, strict=True))})
    return _distance(found, expected)


def _alone(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def _fewer_key_heads(machine: Machine) -> float:
    """Give the kernel fewer key heads without asking for it, where it has no such argument."""
    packing, (query, key, value) = _packed(LENGTHS, machine), _heads(sum(LENGTHS), 128, machine)
    bounds = packing.cu_seqlens_q
    found = varlen_kernel()(query, key, value, bounds, bounds, packing.max_seqlen_q, packing.max_seqlen_q, window_size=(-1, 0))
    return _distance(found, torch_varlen(query, key, value, packing, Scores()))


def _varlen_ms(kernel: Callable[..., Tensor], machine: Machine, sequences: int) -> float:
    total = 8192 if machine.is_gpu else 64
    lengths = [total // sequences] * sequences
    packing, heads = _packed(lengths, machine), [each.requires_grad_() for each in _heads(total, 128, machine)]
    return 1e3 * seconds_of(machine, lambda: kernel(*heads, packing, Scores()).sum().backward())


def sdpa(machine: Machine, report: Report) -> None:
    """Decoding attention over gathered keys, whose length grows by one a step: with and without cuDNN's kernels."""
    requests, longest = (64, 512) if machine.is_gpu else (2, 16)
    for name, with_cudnn in (("as_it_is", True), ("without_cudnn", False)):
        torch.backends.cuda.enable_cudnn_sdp(with_cudnn)
        spent = [_sdpa_ms(machine, requests, longest + grown) for grown in range(12)]
        report.note(
            **{f"first_ms_{name}": spent[0], f"next_ms_{name}": sorted(spent[1:])[5], f"worst_ms_{name}": max(spent[1:])}
        )
        report.note(**{f"again_ms_{name}": _sdpa_ms(machine, requests, longest + 5)})


def _sdpa_ms(machine: Machine, requests: int, keys: int) -> float:
    dtype = torch.bfloat16 if machine.is_gpu else torch.float32
    query = torch.randn(requests, KV_HEADS, HEADS // KV_HEADS, 128, device=machine.device, dtype=dtype)
    key = torch.randn(requests, KV_HEADS, keys, 128, device=machine.device, dtype=dtype)
    mask = torch.ones(requests, 1, 1, keys, device=machine.device, dtype=torch.bool)
    machine.synchronize()
    started = time.perf_counter()
    functional.scaled_dot_product_attention(query, key, key, attn_mask=mask)
    machine.synchronize()
    return 1e3 * (time.perf_counter() - started)


def products(machine: Machine, report: Report) -> None:
    """Matrix products: bfloat16 with a float32 result, the head of a real vocabulary, grouped ones for experts."""
    rows, width, words = (4096, 1024, 151936) if machine.is_gpu else (8, 16, 64)
    hidden = torch.randn(rows, width, device=machine.device, dtype=torch.bfloat16)
    head = torch.randn(words, width, device=machine.device, dtype=torch.bfloat16)
    precise = (hidden[:64].float() @ head.float().T).cpu()

    def float32_out(rows: Tensor) -> Tensor:
        return torch.mm(rows, head.T, out_dtype=torch.float32)

    report.attempt("head_float32_out_distance", lambda: _distance(float32_out(hidden[:64]).cpu(), precise))
    report.attempt("head_bfloat16_distance", lambda: _distance((hidden[:64] @ head.T).float().cpu(), precise))
    report.attempt("head_float32_out_ms", lambda: 1e3 * seconds_of(machine, lambda: float32_out(hidden)))
    report.attempt("head_bfloat16_ms", lambda: 1e3 * seconds_of(machine, lambda: hidden @ head.T))
    report.attempt("grouped_distance", lambda: _grouped_distance(machine))


def _grouped_distance(machine: Machine) -> float:
    experts, rows = torch.randn(4, 64, 128, device=machine.device, dtype=torch.bfloat16), (16, 0, 48, 32)
    tokens = torch.randn(sum(rows), 64, device=machine.device, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor(rows, device=machine.device).cumsum(0).to(torch.int32)
    found = torch._grouped_mm(tokens, experts, offs=ends)
    found.float().sum().backward()
    return _distance(found, torch.cat([part @ each for part, each in zip(tokens.split(rows), experts, strict=True)]))


def activation(machine: Machine, report: Report) -> None:
    """SwiGLU as one kernel, as training has it on a GPU: distance from float32 forward and backward, and speed beside torch."""
    rows, width = (8192, 3072) if machine.is_gpu else (8, 16)
    given = torch.randn(rows, 2 * width, device=machine.device, dtype=torch.bfloat16)
    fused = FusedSwiglu()

    def plain(given: Tensor) -> Tensor:
        left, right = given.chunk(2, dim=-1)
        return functional.silu(left) * right

    def both(compute: Callable[[Tensor], Tensor], given: Tensor) -> tuple[Tensor, Tensor | None]:
        own = given.detach().requires_grad_()
        out = compute(own)
        out.float().square().sum().backward()
        return out, own.grad

    def distances() -> float:
        found, precise = both(fused, given), both(plain, given.float())
        return max(_distance(one, other) for one, other in zip(found, precise, strict=True))

    report.attempt("distance", distances)
    for name, compute in (("fused", fused), ("torch", plain)):
        report.attempt(f"{name}_ms", lambda compute=compute: 1e3 * seconds_of(machine, lambda: both(compute, given)))


def compilers(machine: Machine, report: Report) -> None:
    """A kernel of Triton's, and a function that torch compiles: both need a C compiler."""
    report.attempt("triton_distance", lambda: _triton_distance(machine))
    report.attempt("torch_compile_s", lambda: _compile_s(machine))


def _triton_distance(machine: Machine) -> float:
    from gpu_checks.triton_kernel import doubled

    given = torch.randn(1000, device=machine.device)
    return _distance(doubled(given), 2 * given)


def _compile_s(machine: Machine) -> float:
    started = time.perf_counter()

    @torch.compile
    def gated(left: Tensor, right: Tensor) -> Tensor:
        return functional.silu(left) * right

    left, right = (torch.randn(64, 64, device=machine.device) for _ in range(2))
    assert _distance(gated(left, right), functional.silu(left) * right) < 1e-5
    return time.perf_counter() - started


def _packed(lengths: Sequence[int], machine: Machine) -> PackedSeqParams:
    ends = torch.tensor([0, *lengths], device=machine.device).cumsum(0)
    return packed_params(ends, max(lengths))


def _heads(tokens: int, dim: int, machine: Machine) -> list[Tensor]:
    return [
        torch.randn(tokens, heads, dim, device=machine.device, dtype=torch.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    """Return the distance of the two, relative to the second."""
    assert one is not None
    assert other is not None
    return ((one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-12)).item()


CHECKS: Checks = {"varlen": varlen, "sdpa": sdpa, "products": products, "activation": activation, "compilers": compilers}
