"""Open the configured engine: one in this process, or several in processes of their own."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from async_rl.config import Config
from async_rl.launch.commands import environment
from async_rl.megatron.parallel import resolve_device
from async_rl.models.shape import ModelShape
from async_rl.protocols import Tokenizer
from rollout_workers.inference.engine import MegatronEngine
from rollout_workers.inference.replicas import EngineFleet
from rollout_workers.inference.replicas.placement import worker_gpus


def engine_devices(config: Config, inherited: Mapping[str, str]) -> list[torch.device]:
    """One device for each tensor rank of each engine. `inherited` is the process' environment."""
    kind = resolve_device(config.device).type
    if kind == "cpu":
        return [torch.device(kind)] * (config.worker.engines * config.worker.tensor)
    return [torch.device(kind, number) for number in worker_gpus(config, inherited, torch.cuda.device_count())]


def open_engine(
    config: Config, shape: ModelShape, tokenizer: Tokenizer, *, seed: int, inherited: Mapping[str, str]
) -> MegatronEngine | EngineFleet:
    """Make the engine, to be entered with `async with`. `seed` should differ between workers, or they sample alike."""
    devices = engine_devices(config, inherited)
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
