"""This rank's part of a model with Megatron's gradient buffers and optimizer, and the learning-rate schedule.

With interleaved pipeline stages a rank holds several chunks of the model, otherwise one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor, nn

from async_rl.checkpoints.manifest import AdapterFacts, Layout
from async_rl.config.learner import ExpertsConfig, OptimizerConfig, UpdatesConfig
from async_rl.errors import ConfigError
from async_rl.megatron import host, multi_tensor, weight_gradients
from async_rl.megatron.compat import GPTModel, parallel_state
from async_rl.megatron.experts.routing import RouterObserver
from async_rl.megatron.lora import attach, base_alone
from async_rl.megatron.model import PLAIN, ComputeOptions, LayerSpec, build_chunks
from async_rl.megatron.parallel import current_parallel_sizes
from async_rl.megatron.parameters.adapters import trained_rows
from async_rl.megatron.parameters.full_parameters import held_boxes, load_full, local_parameters
from async_rl.megatron.parameters.table import VALUE_HEAD, Parameter, Split, table
from async_rl.models.shape import ModelShape
from async_rl.transport.plan import Box
from learner.optimizer.host_moments import HostMoments
from learner.optimizer.learning_rate import learning_rate

with host.importing():
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, get_megatron_optimizer
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32


multi_tensor.install()

NO_LOSSES = ExpertsConfig()


def compute_options(learner: UpdatesConfig, device: torch.device, layer_spec: LayerSpec) -> ComputeOptions:
    """Memory-saving settings from the config. Raises ConfigError if this machine does not support them."""
    if learner.precision == "fp8" and (device.type != "cuda" or layer_spec != "transformer_engine"):
        raise ConfigError("learner.precision: fp8 needs a GPU and model.layer_spec: transformer_engine; use auto or bfloat16")
    check_offload("learner.optimizer", learner.optimizer, device)
    return ComputeOptions(
        sequence=learner.parallel.sequence,
        recompute=learner.recompute,
        fp8=learner.precision == "fp8",
        logits_bytes=int(learner.logits_gb * 2**30),
    )


def check_sequence(shape: ModelShape, tensor: int, *, sequence: bool) -> None:
    """Raise ConfigError if every tensor rank would send all tokens to the experts."""
    if shape.experts is not None and tensor > 1 and not sequence:
        raise ConfigError("learner.parallel.sequence: a model with experts needs it to be true where tensor is above 1")


def check_router_losses(experts: ExpertsConfig, shape: ModelShape) -> None:
    """Raise ConfigError if there are losses for routers, and no routers."""
    if shape.experts is None and experts != ExpertsConfig():
        raise ConfigError(
            "learner.experts: the model has no experts, so there is nothing to balance; remove balancing_loss and z_loss"
        )


def check_offload(section: str, optimizer: OptimizerConfig, device: torch.device) -> None:
    if optimizer.offload and device.type != "cuda":
        raise ConfigError(f"{section}.offload moves optimizer state from a GPU to its host; set it to false without a GPU")


def current_layout() -> Layout:
    return Layout(data=parallel_state.get_data_parallel_world_size(), **asdict(current_parallel_sizes()))


class TrainingModel:
    """A trainable model. `async_rl.megatron.parallel.initialize` must have run on the thread that uses it."""

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
        compute: ComputeOptions = PLAIN,
        adapters: AdapterFacts | None = None,
        router_losses: ExpertsConfig = NO_LOSSES,
        draws_weights: bool = True,
    ):
        """`draws_weights` False: the model's own weights, without adapters, are 0 until `load`."""
        check_sequence(shape, current_layout().tensor, sequence=compute.sequence)
        self.shape, self.device, self.dtype, self.layout = shape, device, dtype, current_layout()
        self.adapters = adapters
        """Adapters to train instead of the model's own weights."""
        self.rows = trained_rows(shape, adapters.lora if adapters is not None else None)
        """What is trained and in checkpoints."""
        self.updates = 0
        """Optimizer updates made so far; the learning rate depends on it."""
        self.learning_rate_scale = 1.0
        """Factor on the schedule's learning rate; the guard sets it."""
        self._schedule = partial(learning_rate, optimizer, total=total_updates)
        self._clip = optimizer.clip_grad
        drawn_from = seed if draws_weights else None
        chunks = build_chunks(shape, device=device, dtype=dtype, seed=drawn_from, layer_spec=layer_spec, compute=compute)
        self.adapted = attach(chunks, shape, adapters.lora, seed=seed) if adapters is not None else {}
        """The matrices with adapters, by canonical name."""
        _mark(nn.ModuleList(chunks), [*table(shape), *self.rows])
        trained_dtype = torch.float32 if adapters is not None else dtype
        with host.on_host(), host.quiet():
            wrapped = [self._with_gradient_buffers(chunk, is_first=chunk is chunks[0]) for chunk in chunks]
            self._optimizer = get_megatron_optimizer(self._optimizer_config(optimizer, trained_dtype), list(wrapped))
        self.chunks = nn.ModuleList(wrapped)
        weight_gradients.add_in_products(self.chunks)
        self._prepare_optimizers(offload=optimizer.offload)
        self.routers = self._observed_routers(router_losses) if shape.experts is not None else None
        """What the routers of a model with experts do in an update."""
        for group in self._optimizer.param_groups:
            # Megatron leaves this to its own scheduler, which we do not use
            group["weight_decay"] = optimizer.weight_decay * group["wd_mult"]
        config = chunks[0].config
        # Megatron would sum the gradients of these norms over tensor ranks, which hold different parts of a norm of all heads
        config.qk_layernorm = shape.qk_norm and shape.qk_norm_over == "head"
        config.finalize_model_grads_func = finalize_model_grads
        if self.layout.data > 1:  # reduce while computing, but only what the last row has completed
            pauses = [each.no_sync for each in wrapped]
            config.no_sync_func = pauses if len(pauses) > 1 else pauses[0]  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return self._schedule(updates=self.updates) * self.learning_rate_scale

    @property
    def _wrapped(self) -> list[DistributedDataParallel]:
        return list(self.chunks)  # pyright: ignore[reportReturnType]

    @property
    def optimizers(self) -> list[MegatronOptimizer]:
        """Megatron's optimizers; it chains one per kind of parameter."""
        return list(self._optimizer.chained_optimizers) if isinstance(self._optimizer, ChainedOptimizer) else [self._optimizer]

    def zero_gradients(self) -> None:
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        for parameter in self.chunks.parameters():
            # it aliases the buffer: left in place, the next backward pass would be added twice
            parameter.grad = None

    def gradient_norm(self) -> float:
        """Return the gradient norm over all ranks. Collective; call it between the backward passes and `update`."""
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
        self.merge_adapters()
        self.updates += 1

    def held(self) -> dict[Box, Tensor]:
        """This rank's tensors of the weights that workers receive, in place (no copies)."""
        merged = {name: each.merged for name, each in self.adapted.items()}
        return {box: part for box, part in held_boxes(self.chunks, self.shape, merged).items() if box.name not in VALUE_HEAD}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy full weights into this rank's part and into the optimizer's float32 copies."""
        load_full(self.chunks, self.shape, tensors)
        self._optimizer.reload_model_params()
        self.merge_adapters()

    def merge_adapters(self) -> None:
        """Merge adapters that have changed with their base."""
        for each in self.adapted.values():
            each.refresh()

    @contextmanager
    def base_alone(self) -> Iterator[nn.ModuleList]:
        """The model without its adapters while inside."""
        with base_alone(self.adapted.values()):
            yield self.chunks

    def _observed_routers(self, losses: ExpertsConfig) -> RouterObserver:
        averaged_over = self.layout.data * self.layout.context  # by the gradient buffers
        return RouterObserver(self.chunks, self.shape, losses, gradient_scale=averaged_over)

    def _prepare_optimizers(self, *, offload: bool) -> None:
        """Make torch's Adam one kernel for many parameters, which needs no memory; with offload, keep moments on the host."""
        self.moments_device = host.HOST if offload else None
        """Where moments are between updates; None: with the weights."""
        for each in self.optimizers:
            if isinstance(each.optimizer, torch.optim.Adam | torch.optim.AdamW):
                for group in each.optimizer.param_groups:
                    group |= {"fused": True, "foreach": False}
            if offload and each.optimizer is not None:
                HostMoments(each.optimizer, self.device)

    def _with_gradient_buffers(self, chunk: GPTModel, *, is_first: bool) -> DistributedDataParallel:
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=self.layout.data > 1,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=self.layout.data > 1,
        )
        # later chunks of interleaved stages have no computation left to overlap with
        return DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=not is_first)

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


class FrozenModel:
    """This rank's part of a model that is only evaluated (reference, teacher): no gradients, no optimizer.

    It is split across ranks as the trained model is.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        device: torch.device,
        dtype: torch.dtype,
        seed: int | None = 0,
        layer_spec: LayerSpec = "local",
        compute: ComputeOptions = PLAIN,
    ):
        """`seed` None: all weights are 0 until `load`."""
        self.shape = shape
        chunks = build_chunks(shape, device=device, dtype=dtype, seed=seed, layer_spec=layer_spec, compute=compute)
        self.chunks = nn.ModuleList(chunks).requires_grad_(False).eval()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        load_full(self.chunks, self.shape, tensors)

    @contextmanager
    def evaluated(self) -> Iterator[nn.ModuleList]:
        """The chunks to compute with while inside."""
        yield self.chunks


class FrozenBase:
    """The base of a model with adapters as a frozen model, without a copy of the weights."""

    def __init__(self, model: TrainingModel):
        self.shape, self.evaluated = model.shape, model.base_alone


Reference = FrozenModel | FrozenBase


def _mark(model: nn.Module, table_rows: Iterable[Parameter]) -> None:
    """Mark the parameters that differ between tensor ranks; in a gradient norm Megatron counts the others once.

    Megatron sets these marks while it initialises weights, which we do ourselves. Experts are never sliced by tensor ranks but
    have process groups of their own, which Megatron recognises only if expert parallelism is on: so they are marked too.
    """
    rows = {row.name: row for row in table_rows}
    for name, parameter in local_parameters(model).items():
        row = rows.get(name)
        is_expert = row is not None and row.expert is not None
        is_sliced = row is None or row.split is not Split.WHOLE
        if is_expert:
            parameter.allreduce = False  # pyright: ignore[reportAttributeAccessIssue]
        if is_expert or is_sliced:
            parameter.tensor_model_parallel = True  # pyright: ignore[reportAttributeAccessIssue]
