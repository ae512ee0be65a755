"""Devices, ranks and process groups: everything that must exist before Megatron builds a model."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, get_node_local_rank  # pyright: ignore[reportPrivateImportUsage]

from async_rl.errors import ConfigError
from async_rl.megatron.compat import parallel_state

GROUP_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one job meet, when torchrun did not arrange it."""

    store: Store
    rank: int
    world_size: int


def resolve_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device of this process. Under torchrun each local rank gets its own GPU."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError("device: cuda was asked for, but torch sees no GPU; use `device: auto` or `device: cpu`")
    if name == "cpu" and has_gpu:
        # Megatron asks torch.cuda for its device in many places: half of it would end up on the GPU.
        raise ConfigError("device: cpu on a machine with a GPU needs the GPU hidden: set CUDA_VISIBLE_DEVICES to nothing")
    if not has_gpu:
        return torch.device("cpu")
    return torch.device("cuda", get_node_local_rank(fallback_rank=0))


def resolve_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where hardware has it; CPUs emulate it at a hundredth of the speed."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def initialize(*, device: torch.device, tensor: int = 1, pipeline: int = 1, rendezvous: Rendezvous | None = None) -> None:
    """Join the process group (torchrun's, the given one, or one of a single process) and divide it for Megatron.

    Repeating it with the same sizes changes nothing.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        _join(device, rendezvous)
    ranks = dist.get_world_size()
    if ranks % (tensor * pipeline):
        raise ConfigError(f"learner.parallel: {ranks} ranks cannot be divided into tensor {tensor} x pipeline {pipeline}")
    if parallel_state.model_parallel_is_initialized():
        _check_same(tensor, pipeline)
        return
    parallel_state.initialize_model_parallel(tensor, pipeline)


def shutdown() -> None:
    """Undo `initialize`; safe to call when there is nothing to undo."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def tensor_group() -> dist.ProcessGroup:
    """The ranks that hold the slices of one layer."""
    return cast("dist.ProcessGroup", parallel_state.get_tensor_model_parallel_group())


def pipeline_group() -> dist.ProcessGroup:
    """The ranks that hold the stages of one model."""
    return cast("dist.ProcessGroup", parallel_state.get_pipeline_model_parallel_group())


def _join(device: torch.device, rendezvous: Rendezvous | None) -> None:
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if rendezvous is None and dist.is_torchelastic_launched():
        dist.init_process_group(backend, timeout=GROUP_TIMEOUT)
        return
    if rendezvous is None:
        rendezvous = Rendezvous(store=HashStore(), rank=0, world_size=1)
    dist.init_process_group(
        backend, store=rendezvous.store, rank=rendezvous.rank, world_size=rendezvous.world_size, timeout=GROUP_TIMEOUT
    )


def _check_same(tensor: int, pipeline: int) -> None:
    found = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    if found != (tensor, pipeline):
        raise RuntimeError(f"Megatron is already divided into tensor x pipeline {found}, not {(tensor, pipeline)}")
