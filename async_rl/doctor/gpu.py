"""GPUs: the driver, what torch sees of it, NCCL, and whether processes can share one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from async_rl.doctor.verdict import Verdict, bad, look, ok

OF_THE_DRIVER = ("driver_version", "clocks.sm", "clocks.mem", "power.limit", "compute_mode", "mig.mode.current")
MPS = "nvidia-cuda-mps-control"
ASK_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    driver: str = ""
    """Its version; empty: there is none."""
    cuda: str = ""
    """The CUDA that torch is built for; empty: a torch for CPUs."""
    gpus: tuple[str, ...] = ()
    """Names of the GPUs that torch sees."""
    problem: str = ""
    """Why torch sees none, in torch's words."""
    nccl: str = ""
    compute_mode: str = "Default"
    mps: Literal["absent", "stopped", "runs"] = "absent"
    required: bool = False
    """Whether the run computes on GPUs and nothing else (`device: cuda`)."""
    shared: bool = False
    """Whether `async-rl run` would put learner and workers on one GPU."""


def gather_gpu(environ: Mapping[str, str], *, required: bool, is_run: bool) -> GpuFacts:
    """Ask driver and torch. Without a driver, torch is not imported."""
    if not Path("/proc/driver/nvidia/version").exists():
        return GpuFacts(required=required)
    import torch
    import torch.cuda.nccl

    told = of_the_driver()
    names, problem = (), ""
    try:
        torch.cuda.init()
        names = tuple(torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count()))
    except (AssertionError, RuntimeError) as error:
        problem = str(error).partition("\n")[0].strip()
    return GpuFacts(
        driver=told.get("driver_version", "of an unknown version"),
        cuda=torch.version.cuda or "",
        gpus=names,
        problem=problem,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if names else "",
        compute_mode=told.get("compute_mode", "Default"),
        mps=_mps(environ),
        required=required,
        shared=is_run and len(names) == 1,
    )


def judge_gpu(facts: GpuFacts) -> Iterator[Verdict]:
    if not facts.driver:
        if facts.required:
            yield bad(
                "gpu", "device is cuda, but there is no NVIDIA driver", "install the driver (docs/gpu.md), or set device: cpu"
            )
        else:
            yield ok("gpu", "no NVIDIA driver, so models compute on the CPU")
    elif not facts.cuda:
        yield bad(
            "gpu",
            f"driver {facts.driver}, but this torch is built for CPUs",
            "install a torch that is built for CUDA (docs/gpu.md)",
        )
    elif not facts.gpus:
        yield bad(
            "gpu",
            f"driver {facts.driver}, but torch, built for CUDA {facts.cuda}, sees no GPU ({facts.problem or 'no reason'})",
            "look at CUDA_VISIBLE_DEVICES and whether the driver is new enough for that CUDA",
        )
    else:
        yield ok("gpu", f"{_counted(facts.gpus)}, driver {facts.driver}, CUDA {facts.cuda}, NCCL {facts.nccl}, MPS {facts.mps}")
        yield from _judge_sharing(facts)


def _judge_sharing(facts: GpuFacts) -> Iterator[Verdict]:
    if facts.compute_mode.startswith(("Exclusive", "Prohibited")) and facts.mps != "runs":
        yield look(
            "gpu sharing",
            f"the compute mode is {facts.compute_mode}, so a second process cannot use a GPU",
            f"`nvidia-smi -c DEFAULT` as root, or start MPS (`{MPS} -d`)",
        )
    elif facts.shared and facts.mps != "runs":
        yield look(
            "gpu sharing",
            f"learner and workers take turns on one GPU: MPS is {facts.mps}",
            f"`{MPS} -d` before the run lets their kernels run at the same time",
        )


def of_the_driver() -> dict[str, str]:
    """What nvidia-smi says of the first GPU, by the names of `OF_THE_DRIVER`; nothing if it does not answer."""
    if shutil.which("nvidia-smi") is None:
        return {}
    asked = ["nvidia-smi", f"--query-gpu={','.join(OF_THE_DRIVER)}", "--format=csv,noheader"]
    try:
        ended = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=ASK_S)
    except (subprocess.SubprocessError, OSError):
        return {}
    values = ended.stdout.partition("\n")[0].strip().split(", ")
    return dict(zip(OF_THE_DRIVER, values, strict=True)) if len(values) == len(OF_THE_DRIVER) else {}


def _mps(environ: Mapping[str, str]) -> Literal["absent", "stopped", "runs"]:
    if shutil.which(MPS) is None:
        return "absent"
    return "runs" if (Path(environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists() else "stopped"


def _counted(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
