"""Open the configured engine (`worker.backend`): one in this process, or several in processes of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from async_rl.config import Config
from async_rl.errors import ConfigError, naming_setting
from async_rl.imports.references import load_reference
from async_rl.launch.commands import WORKER_INDEX, environment
from async_rl.megatron.parallel import resolve_device, resolve_dtype
from async_rl.models.shape import ModelShape
from async_rl.plan.worker import num_parcels_on_gpus
from async_rl.protocols import Tokenizer
from rollout_workers.inference.engine import MegatronEngine
from rollout_workers.inference.interface import returns_of
from rollout_workers.inference.replicas import EngineFleet
from rollout_workers.inference.rollout_engine import EngineSetup, RolloutEngine

ENGINE_MEMBERS = ("tokenizer", "generate", "version", "device", "metrics", "swap", "watch", "__aenter__", "__aexit__")
"""What RolloutEngine asks for, beside `returns`."""


def open_engine(
    config: Config, shape: ModelShape, tokenizer: Tokenizer, *, seed: int, inherited: Mapping[str, str]
) -> RolloutEngine:
    """Make the engine, to be entered with `async with`. `seed` should differ between workers, or they sample alike.

    `inherited` is the process' environment. Raises ConfigError.
    """
    kind, worker = resolve_device(config.device).type, config.worker
    if kind == "cpu":
        devices = [torch.device(kind)] * (worker.engines * worker.tensor)
    else:
        devices = [torch.device(kind, number) for number in worker_gpus(config, inherited, torch.cuda.device_count())]
    sampling, layer_spec = config.sampling.generation_args, config.model.layer_spec
    if worker.backend == "megatron" and len(devices) == 1:
        in_place = kind == "cuda" and reads_in_place(config, inherited, torch.cuda.device_count())
        return MegatronEngine(
            shape, tokenizer, worker, sampling, device=devices[0], seed=seed, layer_spec=layer_spec, in_place=in_place
        )
    if worker.backend == "megatron":
        return EngineFleet(
            shape,
            tokenizer,
            config.tokenizer,
            worker,
            sampling,
            devices=devices,
            seed=seed,
            environment=environment(config, inherited),
            folder=config.run_folder if config.run_folder.is_dir() else None,
            layer_spec=layer_spec,
            work_limit_s=config.supervision.work_limit_s,
            num_parcels=num_parcels_on_gpus(config) if kind == "cuda" else 0,
        )
    setup = EngineSetup(
        shape=shape,
        tokenizer=tokenizer,
        worker=worker,
        sampling=sampling,
        devices=tuple(devices),
        dtype=resolve_dtype(devices[0]),
        seed=seed,
    )
    if worker.backend == "hf":
        from rollout_workers.inference.huggingface.engine import HuggingFaceEngine  # late: transformers takes seconds

        return HuggingFaceEngine(setup)
    return _own_engine(worker.backend, setup)


def _own_engine(reference: str, setup: EngineSetup) -> RolloutEngine:
    """Make the engine that a user's code describes. Raises ConfigError when it is none that a worker can use."""
    with naming_setting("worker.backend"):
        make: Any = load_reference(reference)
    try:
        engine = make(setup)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"worker.backend: {reference} cannot be made: {error}") from error
    if missing := [name for name in ENGINE_MEMBERS if not hasattr(engine, name)]:
        raise ConfigError(f"worker.backend: {reference} made {engine!r}, which lacks {', '.join(missing)} (docs/engines.md)")
    if (returns := returns_of(engine)) != "logprobs":
        raise ConfigError(
            f"worker.backend: {reference} has returns = {returns!r}; rollouts are trained on, so its completions must carry "
            "log-probabilities and versions, and `returns` must be 'logprobs'"
        )
    return engine


def reads_in_place(config: Config, environment: Mapping[str, str], visible: int) -> bool:
    """Whether an engine of one device expects to read new weights where the learner packed them: both share the only GPU.

    Versions that it cannot read there after all (no CUDA IPC, a snapshot) come by way of host memory.
    """
    return visible == 1 and WORKER_INDEX in environment and config.learner.parallel.ranks == 1 and config.wire.shared_memory


def worker_gpus(config: Config, environment: Mapping[str, str], visible: int) -> list[int]:
    """The numbers of a worker's GPUs, one for each tensor rank of each engine.

    Workers of `async-rl run` use the GPUs after those of the learner, one worker after the other, or share GPUs if there
    are too few. A worker started alone begins at the first visible GPU.
    """
    needed = config.worker.engines * config.worker.tensor
    if needed > visible:
        raise ConfigError(
            f"worker.engines ({config.worker.engines}) x worker.tensor ({config.worker.tensor}) need {needed} GPUs, and this "
            f"process sees {visible}; lower one of them"
        )
    first = 0
    if WORKER_INDEX in environment:
        learner = config.learner.parallel.ranks
        has_room = learner + config.worker.processes * needed <= visible
        first = int(environment[WORKER_INDEX]) * needed + (learner if has_room else 0)
    return [(first + offset) % visible for offset in range(needed)]
