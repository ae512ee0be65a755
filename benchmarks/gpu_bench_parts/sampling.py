"""The sampler by itself, with which a decode step ends: on all tokens, and with top-k and top-p, as evaluations ask for."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from gpu_checks.ceilings import seconds_of
from gpu_checks.report import Checks, Machine, Report
from torch import Tensor

from rollout_workers.inference.generation import Generation, Sampling
from rollout_workers.inference.torch_draws import Drawn, TorchDraws

WAYS = {"all": {"top_k": 0, "top_p": 1.0}, "top_p": {"top_k": 0, "top_p": 0.95}, "top_k_top_p": {"top_k": 20, "top_p": 0.95}}


def sampling(machine: Machine, report: Report) -> None:
    """Milliseconds a draw, for rows of Qwen3's vocabulary in float32, of which a few entries are likely."""
    vocabulary, batches = (151_936, (1, 64, 512)) if machine.is_gpu else (4000, (1, 4))
    for batch in batches:
        noise = torch.Generator(machine.device).manual_seed(7)
        logits = 2 * torch.randn(batch, vocabulary, generator=noise, device=machine.device)
        logits[:, ::3000] += 12.0
        for way, arguments in WAYS.items():
            draw = _draw(machine, batch, arguments)
            seconds = seconds_of(machine, lambda draw=draw, logits=logits: draw(logits))
            report.note(**{f"batch_{batch}_{way}_ms": 1e3 * seconds})


def _draw(machine: Machine, batch: int, arguments: dict[str, float]) -> Callable[[Tensor], Drawn]:
    asked = Sampling(
        max_tokens=9, temperature=1.0, top_p=arguments["top_p"], top_k=int(arguments["top_k"]), stop=(), stop_token_ids=(),
        seed=None,
    )  # fmt: skip
    generations = [Generation(id=number, prompt=[1], sampling=asked, finish=print) for number in range(batch)]
    if machine.is_gpu:
        from rollout_workers.inference.sampling_kernels import TritonDraws  # late: not everyone has Triton

        return TritonDraws(generations, machine.device, random.Random(7)).draw
    return TorchDraws(generations, machine.device, torch.Generator().manual_seed(7)).draw


CHECKS: Checks = {"sampling": sampling}
