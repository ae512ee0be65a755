"""How each role is started: its command line and its environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from async_rl.config.training import AnyRun

Role = Literal[
    "buffer",
    "buffer.run_audit",
    "learner",
    "learner.training",
    "learner.models",
    "rollout_workers",
    "rollout_workers.inference.replicas.rank",
    "rollout_workers.attaching",
    "rollout_workers.checking",
    "rollout_workers.remote",
    "rollout_workers.reward_model",
    "rollout_workers.evaluation",
]

_PYTHON = (sys.executable, "-P")  # -P: a stray buffer/ in the working folder is not imported

SCHEDULED = "scheduled"
"""The word with which an evaluator follows a run (`async-rl evaluator`)."""

WORKER_INDEX = "ASYNC_RL_WORKER_INDEX"
"""Which of the workers that `async-rl run` starts on this machine it is: they divide the GPUs among them."""

_THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def command(role: Role, args: Sequence[str]) -> list[str]:
    return [*_PYTHON, "-m", role, *args]


def ranks_command(role: Literal["learner", "learner.training"], args: Sequence[str], config: AnyRun) -> list[str]:
    """As many ranks as learner.parallel asks for, all of them on this machine."""
    ranks = config.learner.parallel.ranks
    if ranks == 1:
        return command(role, args)
    return [*_PYTHON, "-m", "async_rl.supervision.processes.ranks", str(ranks), str(config.run_folder / "logs"), role, *args]


def environment(config: AnyRun, inherited: Mapping[str, str]) -> dict[str, str]:
    """What a role inherits, plus what it needs."""
    given = {**inherited, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    given.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # a worker that leaves is no reason for stack traces of torch's stores
    given.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron's tensor parallelism relies on the order this gives
    if config.learner.deterministic:
        given.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS chooses among ways to add up
    if computes_on_cpu(config):  # several processes share the cores: a thread pool in each makes all of them slower
        for name in _THREAD_SETTINGS:
            given.setdefault(name, "1")
    return given


def computes_on_cpu(config: AnyRun) -> bool:
    """`auto` is settled without importing torch: where no NVIDIA driver is loaded there is no CUDA."""
    if config.device == "auto":
        return not Path("/proc/driver/nvidia/version").exists()
    return config.device == "cpu"
