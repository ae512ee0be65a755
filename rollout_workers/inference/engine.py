"""The Megatron engine: `worker.backend: megatron`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch
from torch import Tensor

from async_rl.config.rollout import WorkerConfig
from async_rl.megatron import host, parallel
from async_rl.megatron.model import LayerSpec
from async_rl.models.shape import ModelShape
from async_rl.protocols import GenerationArgs, Tokenizer
from async_rl.transport.receiving.placement import Placement
from rollout_workers.inference.engine_core import EngineCore, OpenWeights
from rollout_workers.inference.stepped_engine import SteppedEngine


class MegatronEngine(SteppedEngine):
    """Samples with Megatron's dynamic engine."""

    def __init__(
        self,
        shape: ModelShape,
        tokenizer: Tokenizer,
        worker: WorkerConfig,
        sampling: GenerationArgs,
        *,
        device: torch.device,
        seed: int,
        dtype: torch.dtype | None = None,
        layer_spec: LayerSpec = "local",
        in_place: bool = False,
        core: Callable[..., EngineCore] = EngineCore,
    ) -> None:
        """`sampling` holds the run's defaults; `seed` should differ between workers, or they sample alike.

        `dtype` None means the device's default. `in_place`: as EngineCore's. `core` makes the object that the thread calls.
        """
        self.placement = Placement(devices=(device,), fetched_to=host.HOST if in_place else None)
        chosen = dtype if dtype is not None else parallel.resolve_dtype(device)

        def build() -> EngineCore:
            return core(
                shape=shape,
                tokenizer=tokenizer,
                worker=worker,
                device=device,
                dtype=chosen,
                seed=seed,
                layer_spec=layer_spec,
                in_place=in_place,
            )

        super().__init__(shape, tokenizer, sampling, device=device, dtype=chosen, build=build)

    async def stage(self, weights: OpenWeights) -> Mapping[str, Tensor]:
        """Bring full parameters to where `swap`, which takes the result, reads them fastest. Decoding goes on meanwhile."""
        return await asyncio.wrap_future(await self._loop.run_in_executor(self._thread, self._begin_stage, weights))

    def _begin_stage(self, weights: OpenWeights) -> Future[Mapping[str, Tensor]]:
        if not isinstance(self._core, EngineCore):
            raise self._stopped()
        return self._core.begin_stage(weights)
