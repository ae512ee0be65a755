"""Devices, ranks and process groups, which must exist before Megatron builds a model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, Store, get_node_local_rank  # pyright: ignore[reportPrivateImportUsage]

from async_rl.errors import ConfigError
from async_rl.megatron.compat import parallel_state
from async_rl.transport.wire.gloo import closed_listeners

GROUP_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """How the ranks of one job find each other."""

    store: Store | None
    """None: torch's own, at MASTER_ADDR and MASTER_PORT."""
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParallelSizes:
    """Sizes of the parallel dimensions; remaining ranks are data-parallel."""

    tensor: int
    pipeline: int
    virtual_stages: int
    """Chunks of the model per pipeline rank (interleaved pipeline)."""
    context: int
    expert: int

    def __str__(self) -> str:
        """Only sizes above 1."""
        sizes = {field.name: getattr(self, field.name) for field in fields(self)}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "a single rank"

    def check(self, ranks: int) -> None:
        if ranks % (of_a_copy := self.tensor * self.pipeline * self.context):
            raise ConfigError(
                f"learner.parallel: {ranks} ranks cannot be divided into {self}; start a multiple of {of_a_copy} "
                "(learner.parallel.processes, or WORLD_SIZE)"
            )
        if ranks // self.pipeline % self.expert:
            of_a_stage = ranks // self.pipeline
            raise ConfigError(f"learner.parallel.expert ({self.expert}) must divide the ranks of one stage ({of_a_stage})")


def resolve_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device of this process: GPU number LOCAL_RANK, or the CPU. Raises ConfigError."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError("device: cuda was asked for, but torch sees no GPU; use `device: auto` or `device: cpu`")
    if name == "cpu" and has_gpu:
        # Megatron asks torch.cuda for its device in many places: half of it would end up on the GPU.
        raise ConfigError("device: cpu on a machine with a GPU needs the GPU hidden: set CUDA_VISIBLE_DEVICES to nothing")
    if not has_gpu:
        return torch.device("cpu")
    return torch.device("cuda", get_node_local_rank(fallback_rank=0))


def resolve_dtype(device: torch.device, precision: Literal["auto", "float32", "bfloat16", "fp8"] = "auto") -> torch.dtype:
    """The dtype of weights. `auto`: bfloat16 on CUDA, float32 on a CPU, which emulates bfloat16 slowly. fp8: bfloat16."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.float32 if precision == "float32" else torch.bfloat16


def initialize(
    *,
    device: torch.device,
    tensor: int = 1,
    pipeline: int = 1,
    virtual_stages: int = 1,
    context: int = 1,
    expert: int = 1,
    rendezvous: Rendezvous | None = None,
) -> None:
    """Join a process group (without `rendezvous`: of this process alone) and create Megatron's parallel groups.

    Expert parallelism places experts on ranks of the tensor, context and data dimensions; an expert is never split. Repeating
    the call with the same sizes does nothing.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        with closed_listeners():
            _join(device, rendezvous)
    wanted = ModelParallelSizes(tensor=tensor, pipeline=pipeline, virtual_stages=virtual_stages, context=context, expert=expert)
    wanted.check(dist.get_world_size())
    if parallel_state.model_parallel_is_initialized():
        if (found := current_parallel_sizes()) != wanted:
            raise RuntimeError(f"Megatron is already divided as {found}, not {wanted}")
        return
    with closed_listeners():  # about thirty groups, each of which listens on a port
        parallel_state.initialize_model_parallel(
            tensor,
            pipeline,
            virtual_pipeline_model_parallel_size=virtual_stages if virtual_stages > 1 else None,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=1,
        )


def shutdown() -> None:
    """Destroy all process groups. Safe to repeat."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def current_parallel_sizes() -> ModelParallelSizes:
    virtual_stages = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return ModelParallelSizes(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_stages=virtual_stages if virtual_stages is not None else 1,
        context=parallel_state.get_context_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
    )


def tensor_group() -> dist.ProcessGroup:
    """The tensor-parallel group: ranks that hold slices of the same layers."""
    return cast("dist.ProcessGroup", parallel_state.get_tensor_model_parallel_group())


def context_group() -> dist.ProcessGroup:
    """The context-parallel group: ranks that hold parts of the same rows."""
    return cast("dist.ProcessGroup", parallel_state.get_context_parallel_group())


def data_group() -> dist.ProcessGroup:
    """The data-parallel group: ranks with the same part of the model and different rows."""
    return cast("dist.ProcessGroup", parallel_state.get_data_parallel_group())


def all_reduced(values: Tensor, group: dist.ProcessGroup, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `values` in place over the ranks of a group, and return them."""
    if group.size() > 1:
        dist.all_reduce(values, operation, group=group)
    return values


def _join(device: torch.device, rendezvous: Rendezvous | None) -> None:
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if rendezvous is None:
        rendezvous = Rendezvous(store=HashStore(), rank=0, world_size=1)
    dist.init_process_group(
        backend, store=rendezvous.store, rank=rendezvous.rank, world_size=rendezvous.world_size, timeout=GROUP_TIMEOUT
    )
