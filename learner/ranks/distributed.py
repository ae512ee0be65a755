"""Initialise torch.distributed and Megatron's process groups for one rank."""

from __future__ import annotations

import torch

from async_rl.config.training import AnyRun
from async_rl.megatron import parallel, triton_kernels


def init_distributed(run: AnyRun, rendezvous: parallel.Rendezvous | None = None) -> torch.device:
    """Initialise this rank and return its device. Blocks until all ranks have called it. `parallel.shutdown` undoes it."""
    device = parallel.resolve_device(run.device)
    if device.type == "cpu":
        # small matrices: a second thread costs more than it gains, and the workers need the core
        torch.set_num_threads(1)
    torch.manual_seed(run.run.seed)  # torch's default seed differs between processes
    if run.learner.deterministic:
        torch.use_deterministic_algorithms(True)
    triton_kernels.choose(run.learner.kernels)
    sizes = run.learner.parallel
    parallel.initialize(
        device=device,
        tensor=sizes.tensor,
        pipeline=sizes.pipeline,
        virtual_stages=sizes.virtual_stages,
        context=sizes.context,
        expert=sizes.expert,
        rendezvous=rendezvous,
    )
    return device
