"""Open the configured engine: one in this process, or several in processes of their own."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.launch.commands import WORKER_INDEX, environment
from async_rl.megatron.parallel import resolve_device
from async_rl.models.shape import ModelShape
from async_rl.protocols import Tokenizer
from rollout_workers.inference.engine import MegatronEngine
from rollout_workers.inference.replicas import EngineFleet


def open_engine(
    config: Config, shape: ModelShape, tokenizer: Tokenizer, *, seed: int, inherited: Mapping[str, str]
) -> MegatronEngine | EngineFleet:
    """Make the engine, to be entered with `async with`. `seed` should differ between workers, or they sample alike.

    `inherited` is the process' environment.
    """
    kind = resolve_device(config.device).type
    if kind == "cpu":
        devices = [torch.device(kind)] * (config.worker.engines * config.worker.tensor)
    else:
        devices = [torch.device(kind, number) for number in worker_gpus(config, inherited, torch.cuda.device_count())]
    sampling, layer_spec = config.sampling.generation_args, config.model.layer_spec
    if len(devices) == 1:
        return MegatronEngine(shape, tokenizer, config.worker, sampling, device=devices[0], seed=seed, layer_spec=layer_spec)
    return EngineFleet(
        shape,
        tokenizer,
        config.tokenizer,
        config.worker,
        sampling,
        devices=devices,
        seed=seed,
        environment=environment(config, inherited),
        folder=config.run_folder if config.run_folder.is_dir() else None,
        layer_spec=layer_spec,
        work_limit_s=config.supervision.work_limit_s,
    )


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
