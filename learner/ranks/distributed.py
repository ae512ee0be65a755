"""How a process takes its place among the ranks that train one model."""

from __future__ import annotations

import torch

from async_rl.config.training import AnyRun
from async_rl.megatron import parallel


def init_distributed(run: AnyRun, rendezvous: parallel.Rendezvous | None = None) -> torch.device:
    """Join the other ranks, if there are any, and return the device of this one. `parallel.shutdown` undoes it."""
    device = parallel.resolve_device(run.device)
    if device.type == "cpu":
        # small matrices: a second thread costs more than it brings, and the workers need the core
        torch.set_num_threads(1)
    torch.manual_seed(run.run.seed)  # torch's own choice differs from process to process
    if run.learner.deterministic:
        torch.use_deterministic_algorithms(True)
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
