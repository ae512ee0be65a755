"""This rank's part of the shared model, made trainable: Megatron's gradient buffers, its optimizer, the schedule."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.checkpoint_files import Layout
from async_rl.learner_config import OptimizerConfig
from async_rl.megatron import host
from async_rl.megatron.compat import parallel_state
from async_rl.megatron.model import LayerSpec, build_model
from async_rl.megatron.parameters import Split, gather_full, load_full, local_parameters, table
from async_rl.model_shape import ModelShape
from learner.schedule import learning_rate

with host.quiet():
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
        param_and_grad_buffer,
    )
    from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, get_megatron_optimizer
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32


def current_layout() -> Layout:
    return Layout(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        data=parallel_state.get_data_parallel_world_size(),
    )


class TrainingModel:
    """`async_rl.megatron.parallel.initialize` must have run, on the thread that uses this."""

    def __init__(
        self,
        shape: ModelShape,
        optimizer: OptimizerConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        total_updates: int,
        layer_spec: LayerSpec = "local",
    ):
        self.shape, self.device, self.layout = shape, device, current_layout()
        self.updates = 0
        """Optimizer updates made so far: what the learning rate depends on."""
        self._schedule = partial(learning_rate, optimizer, total=total_updates)
        self._clip = optimizer.clip_grad
        model = build_model(shape, device=device, dtype=dtype, seed=seed, layer_spec=layer_spec)
        _mark_tensor_slices(model, shape)
        with host.on_host(), host.quiet():
            self.ddp = self._with_gradient_buffers(model)
            self._optimizer = get_megatron_optimizer(self._optimizer_config(optimizer, dtype), [self.ddp])
        for group in self._optimizer.param_groups:
            # Megatron leaves this to its own scheduler, which we do not use
            group["weight_decay"] = optimizer.weight_decay * group["wd_mult"]
        model.config.finalize_model_grads_func = finalize_model_grads

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return self._schedule(updates=self.updates)

    @property
    def optimizers(self) -> list[MegatronOptimizer]:
        """Megatron chains one per kind of parameter."""
        return list(self._optimizer.chained_optimizers) if isinstance(self._optimizer, ChainedOptimizer) else [self._optimizer]

    def zero_gradients(self) -> None:
        self.ddp.zero_grad_buffer()
        for parameter in self.ddp.parameters():
            # left in place it would be the buffer itself, and the next backward pass would add to it twice
            parameter.grad = None

    def gradient_norm(self) -> float:
        """Over all ranks, so every one gets the same answer. Comes between the backward passes and `update`."""
        with host.on_host():
            self._optimizer.prepare_grads()
            return float(self._optimizer.get_grad_norm())

    def update(self, gradient_norm: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate
        with host.on_host():
            if self._clip > 0:
                for each in self.optimizers:
                    clip_grad_by_total_norm_fp32([*each.get_parameters()], self._clip, gradient_norm)
            self._optimizer.step_with_ready_grads()
        self.updates += 1

    def gather(self) -> dict[str, Tensor] | None:
        """A snapshot of the full weights on rank 0, None elsewhere. Every rank must call it."""
        return gather_full(self.ddp, self.shape)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Full weights into every rank's part, and into the optimizer's float32 copies of them."""
        load_full(self.ddp, self.shape, tensors)
        self._optimizer.reload_model_params()

    def _with_gradient_buffers(self, model: torch.nn.Module) -> DistributedDataParallel:
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=self.layout.data > 1, grad_reduce_in_fp32=True, overlap_grad_reduce=False
        )
        return DistributedDataParallel(model.config, config, model)  # pyright: ignore[reportArgumentType]

    def _optimizer_config(self, config: OptimizerConfig, dtype: torch.dtype) -> MegatronOptimizerConfig:
        return MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.learning_rate,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            weight_decay=config.weight_decay,
            clip_grad=config.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=self.layout.data > 1,
        )


def _mark_tensor_slices(model: torch.nn.Module, shape: ModelShape) -> None:
    """Tell Megatron's gradient norm which parameters differ between tensor ranks: the others it counts once.

    Megatron marks them while it initialises weights, which it does not do for us.
    """
    is_whole = {row.name for row in table(shape) if row.split is Split.WHOLE}
    for name, parameter in local_parameters(model).items():
        if name not in is_whole:
            parameter.tensor_model_parallel = True  # pyright: ignore[reportAttributeAccessIssue]


def _name_collectives_as_torch_does() -> None:
    """Megatron calls two collectives by names that torch has deprecated, with a warning at every step."""
    for alias, current in (
        ("dist_reduce_scatter_func", "reduce_scatter_single"),
        ("dist_all_gather_func", "all_gather_single"),
    ):
        if hasattr(param_and_grad_buffer, alias) and hasattr(dist, current):
            setattr(param_and_grad_buffer, alias, getattr(dist, current))


_name_collectives_as_torch_does()
