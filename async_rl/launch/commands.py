"""The command line and environment variables of each role's process."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from async_rl.supervision.processes.ranks import RankRange

if TYPE_CHECKING:
    from async_rl.config.training import AnyRun

Role = Literal[
    "buffer",
    "buffer.doctor",
    "buffer.joining",
    "buffer.run_audit",
    "buffer.view",
    "learner",
    "learner.checking",
    "learner.training",
    "learner.training.checking",
    "learner.models",
    "learner.models.shrinking",
    "learner.simulation",
    "rollout_workers",
    "rollout_workers.inference.replicas.rank",
    "rollout_workers.attaching",
    "rollout_workers.checking",
    "rollout_workers.checking.configuration",
    "rollout_workers.remote",
    "rollout_workers.reward_model",
    "rollout_workers.evaluation",
]

_PYTHON = (sys.executable, "-P")  # -P: do not import a buffer/ in the working directory

SCHEDULED = "scheduled"
"""Argument of an evaluator that follows a run (`async-rl evaluator`)."""

WORKER_INDEX = "ASYNC_RL_WORKER_INDEX"
"""Index of a worker among those that `async-rl run` starts on this machine, which divide its GPUs."""

HAS_JOINED = "ASYNC_RL_HAS_JOINED"
"""Set for a worker whose configuration came from the run that it joined: it trusts that run with less."""

_THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def command(role: Role, args: Sequence[str]) -> list[str]:
    return [*_PYTHON, "-m", role, *args]


def ranks_command(
    role: Literal["learner", "learner.training"], args: Sequence[str], config: AnyRun, ranks: RankRange | None = None
) -> list[str]:
    """The command that starts ranks on this machine: all of learner.parallel, or these."""
    if ranks is None:
        ranks = RankRange(count=config.learner.parallel.ranks, world=config.learner.parallel.ranks)
    if ranks.world == 1:
        return command(role, args)
    return [*_PYTHON, "-m", "async_rl.supervision.processes.ranks", str(ranks), str(config.run_folder / "logs"), role, *args]


def environment(config: AnyRun, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a role: the inherited ones plus those it needs."""
    given = {**inherited, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    given.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # else torch's stores print stack traces when a worker leaves
    if config.learner.deterministic:
        given.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS sums in varying order
    if computes_on_cpu(config):  # processes share the cores; a thread pool in each would slow down all of them
        for name in _THREAD_SETTINGS:
            given.setdefault(name, "1")
    return given


def learner_environment(config: AnyRun, shared: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a learner's ranks, from those of all roles."""
    if config.learner.parallel.tensor == config.learner.parallel.context == 1:
        return {**shared}
    # Megatron relies on this order of kernels here; anywhere else, copies would wait for the computation that they run beside
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **shared}


def computes_on_cpu(config: AnyRun) -> bool:
    """Whether models compute on the CPU. `auto` is resolved without torch: no NVIDIA driver, no CUDA."""
    if config.device == "auto":
        return not Path("/proc/driver/nvidia/version").exists()
    return config.device == "cpu"
