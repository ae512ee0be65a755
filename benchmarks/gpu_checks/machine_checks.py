"""What this machine has: versions, driver, compilers, environment, and its measured ceilings."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence

import torch
import torch.cuda.nccl

from async_rl.config.rollout import WorkerConfig
from async_rl.doctor.gpu import OF_THE_DRIVER
from async_rl.imports.software import version_of
from async_rl.megatron import parallel
from async_rl.megatron.attention.paged_attention import attention_for, kernel_name
from gpu_checks import ceilings
from gpu_checks.report import SMALL, Checks, Machine, Report

PACKAGES = (
    "megatron-core",
    "triton",
    "transformers",
    "numpy",
    "transformer-engine",
    "flash-attn",
    "flash-attn-4",
    "nvidia-cublas",
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu13",
    "redis",
    "msgpack",
    "aiohttp",
    "pydantic",
    "safetensors",
)
TELLING = ("CUDA_", "NCCL_", "NVTE_", "OMP_", "PYTORCH_", "TORCH_", "TRITON_")
"""Beginnings of the environment variables that change what is measured."""


def environment(machine: Machine, report: Report) -> None:
    report.note(device=str(machine.device), python=platform.python_version(), torch=torch.__version__)
    report.note(**{package: version_of(package) for package in PACKAGES})
    parallel.initialize(device=machine.device)
    dtype = parallel.resolve_dtype(machine.device)
    report.note(
        dtype=str(dtype).removeprefix("torch."),
        attention=kernel_name(attention_for(machine.device, SMALL, WorkerConfig().kv_block_tokens, may_be_flash=False)),
    )
    report.note(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 0),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        shm_gib=shutil.disk_usage("/dev/shm").total / 2**30 if os.path.isdir("/dev/shm") else 0.0,  # noqa: PTH112
        system=platform.release(),
        **{name: _first_line(name, "--version") for name in ("gcc", "g++", "nvcc")},
        mps=shutil.which("nvidia-cuda-mps-control") or "absent",
    )
    report.note(**{name: value for name, value in sorted(os.environ.items()) if name.startswith(TELLING)})
    if machine.is_gpu:
        _note_gpu(machine, report)


def _note_gpu(machine: Machine, report: Report) -> None:
    facts = torch.cuda.get_device_properties(machine.device)
    report.note(
        gpu=facts.name,
        gpu_gib=facts.total_memory / 2**30,
        gpus=torch.cuda.device_count(),
        compute_capability=f"{facts.major}.{facts.minor}",
        multiprocessors=facts.multi_processor_count,
        cuda=str(torch.version.cuda),
    )
    unknown: tuple[tuple[str, Callable[[], object]], ...] = (
        ("nccl", lambda: ".".join(map(str, torch.cuda.nccl.version()))),
        ("cudnn", torch.backends.cudnn.version),
        ("cudnn_sdp", torch.backends.cuda.cudnn_sdp_enabled),
        ("sdp_order", lambda: [str(each) for each in torch._C._get_sdp_priority_order()]),
    )
    for name, ask in unknown:
        report.attempt(name, lambda ask=ask: str(ask()))
    asked = ("nvidia-smi", f"--query-gpu={','.join(OF_THE_DRIVER)}", "--format=csv,noheader")
    values = _first_line(*asked).split(", ")
    report.note(**dict(zip(OF_THE_DRIVER, values if len(values) == len(OF_THE_DRIVER) else [", ".join(values)], strict=False)))


def measure(machine: Machine, report: Report) -> None:
    """Measure memory, matrix products and the way to the host and back."""
    report.note(copy_gb_s=ceilings.copy_bytes_per_s(machine) / 1e9)
    report.note(bfloat16_tflops=ceilings.product_flops_per_s(machine) / 1e12)
    for name, pinned in (("pinned", True), ("pageable", False)):
        report.note(
            **{
                f"from_device_{name}_gb_s": ceilings.from_device_bytes_per_s(machine, pinned=pinned) / 1e9,
                f"to_device_{name}_gb_s": ceilings.to_device_bytes_per_s(machine, pinned=pinned) / 1e9,
            }
        )


def _first_line(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return "absent"
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    lines: Sequence[str] = (ended.stdout.strip() or ended.stderr.strip() or "said nothing").splitlines()
    return next((line for line in lines if "release" in line), lines[0]).strip()


CHECKS: Checks = {"environment": environment, "ceilings": measure}
