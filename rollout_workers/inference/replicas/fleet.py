"""Several engines behind one `InferenceInterface`: each generation goes to one of them, each swap to all."""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from async_rl.config import TokenizerConfig
from async_rl.config.rollout import WorkerConfig
from async_rl.errors import AsyncRLError, ServiceStopped
from async_rl.megatron import host, parallel
from async_rl.megatron.model import LayerSpec
from async_rl.megatron.parameters.full_parameters import check_complete, specs
from async_rl.models.engine_limits import check_worker_ranks
from async_rl.models.parameter_spec import ParameterSpec
from async_rl.models.shape import ModelShape
from async_rl.protocols import GenerationArgs, Prompt, Returns, Tokenizer
from async_rl.tokenization.rendering import prompt_ids
from async_rl.transport.receiving.placement import Placement
from async_rl.types import Completion
from rollout_workers.inference.interface import Inference
from rollout_workers.inference.replicas.frames import Generate, LoadWeights, SharedParcels
from rollout_workers.inference.replicas.replica import Replica
from rollout_workers.inference.replicas.routing import Router
from rollout_workers.inference.replicas.setup import RankSetup
from rollout_workers.inference.replicas.shared_weights import SharedWeights
from rollout_workers.inference.rollout_engine import EngineMetrics

FOLDER_PREFIX = "engines-"
"""Prefix of the folder in which the ranks of a worker's engines find each other."""


class EngineFleet(Inference):
    """Enter with `async with`: entering starts the processes and builds their engines, leaving ends them.

    It has the interface of MegatronEngine.
    """

    returns: Returns = "logprobs"

    def __init__(
        self,
        shape: ModelShape,
        tokenizer: Tokenizer,
        tokenizer_config: TokenizerConfig,
        worker: WorkerConfig,
        sampling: GenerationArgs,
        *,
        devices: Sequence[torch.device],
        seed: int,
        environment: Mapping[str, str],
        folder: Path | None = None,
        dtype: torch.dtype | None = None,
        layer_spec: LayerSpec = "local",
        work_limit_s: float = 0.0,
        num_parcels: int = 0,
    ) -> None:
        """`devices`: one for each rank, engine by engine. `environment` is that of the rank processes; in `folder` they
        find each other, unset means the system's temporary folder. `num_parcels`: parcels of a version that are received
        on the devices; 0: in host memory.
        """
        check_worker_ranks(shape, worker.tensor, worker.expert)
        self.tokenizer = tokenizer
        self.placement = Placement(devices=tuple(devices) if num_parcels else (host.HOST,), is_shared=True)
        self.device = self.placement.devices[0]
        self.kernel = ""
        """Name of the attention kernel used for decoding."""
        self.version = -1
        """The version that every engine has loaded; -1 before the first weights."""
        self.shape = shape
        self._worker = worker
        self._defaults = sampling
        self._dtype = dtype if dtype is not None else parallel.resolve_dtype(devices[0])
        self._devices = devices
        self._seed = seed
        self._environment = environment
        self._parent = folder
        self._rank = partial(
            RankSetup,
            shape=shape,
            tokenizer=tokenizer_config,
            worker=worker,
            layer_spec=layer_spec,
            work_limit_s=work_limit_s,
            num_parcels=num_parcels,
        )
        self._ids = itertools.count()
        self._router = Router(replicas=worker.engines, block_tokens=worker.kv_block_tokens)
        self._swapping = asyncio.Lock()
        self._memory_users: Sequence[asyncio.Future[Any]] = []
        """Running writes and reads of the weights, also those of a cancelled swap."""
        self._layout = ""
        """Digest of the layout that the ranks know."""
        self._replicas: list[Replica] = []

    async def __aenter__(self) -> EngineFleet:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        """Done once the fleet is closed or broken."""
        self._folder = TemporaryDirectory(prefix=FOLDER_PREFIX, dir=self._parent)
        self._weights = SharedWeights(self.specs)
        self._replicas = [
            Replica(f"engine {number}", self._ranks(number), self._environment, self._lost)
            for number in range(self._worker.engines)
        ]
        self._running = asyncio.create_task(self._run(), name="engines")
        try:
            for replica in self._replicas:
                self.kernel = (await replica.ready).kernel
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close()
        if error is None:
            self._ended.result()

    async def watch(self) -> None:
        """Service: return when the fleet is closed, raise ServiceStopped when one of its processes has ended."""
        await asyncio.shield(self._ended)

    async def _generate(self, prompt: Prompt, args: GenerationArgs) -> Completion:
        self._raise_if_stopped()
        token_ids = prompt_ids(prompt, self.tokenizer)
        request = Generate(id=next(self._ids), prompt=token_ids, args=args.over(self._defaults))
        number = self._router.choose(request.prompt)
        try:
            completion = (await self._replicas[number].ask(request)).completion
            assert completion is not None
            return completion
        except asyncio.CancelledError:
            self._replicas[number].cancel(request)
            raise
        finally:
            self._router.ended(number)

    async def swap(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Serve other weights everywhere; `tensors` are full parameters under canonical names. See MegatronEngine.

        Raises ValueError, and changes nothing, when the tensors do not fit or `version` does not exceed the one held.
        """
        check_complete(self.shape, tensors)
        async with self._swapping:
            self._raise_if_stopped()
            if version <= self.version:
                raise ValueError(f"weights of version {version} cannot replace version {self.version}: versions only grow")
            if self._memory_users:
                await asyncio.wait(self._memory_users)
            describing = self._loop.run_in_executor(None, self._describe, tensors)
            await self._finish([describing])
            digest, parcels = describing.result()
            requests = [LoadWeights(id=next(self._ids), version=version, parcels=parcels) for _ in self._replicas]
            loading = [replica.ask(request) for replica, request in zip(self._replicas, requests, strict=True)]
            self._layout = digest
            await self._finish(loading)
            self.version = version

    def _describe(self, tensors: Mapping[str, Tensor]) -> tuple[str, SharedParcels]:
        """The digest of the layout, and what the ranks are told."""
        layout, addresses = self._weights.describe(tensors)
        text = layout.to_json() if layout.digest != self._layout else b""
        return layout.digest, SharedParcels(layout=text, addresses=addresses)

    @property
    def specs(self) -> list[ParameterSpec]:
        """The parameters that `swap` expects."""
        return specs(self.shape, self._dtype)

    @property
    def metrics(self) -> EngineMetrics:
        """Metrics of all engines, at most a heartbeat old: sums, and the mean of the queue times."""
        reports = [replica.metrics for replica in self._replicas if replica.metrics is not None]
        sums = {field.name: sum(getattr(report, field.name) for report in reports) for field in fields(EngineMetrics)}
        return EngineMetrics(**{**sums, "queue_s": sums["queue_s"] / max(1, len(reports))})

    @property
    def loads(self) -> Sequence[int]:
        """Number of generations of each engine."""
        return self._router.loads

    def _ranks(self, engine: int) -> list[RankSetup]:
        ranks = self._worker.tensor
        return [
            self._rank(
                rank=rank,
                seed=zlib.crc32(f"{self._seed}/{engine}".encode()),
                device=str(device),
                dtype=str(self._dtype).removeprefix("torch."),
                store=Path(self._folder.name) / f"engine-{engine}",
            )
            for rank, device in enumerate(self._devices[engine * ranks : (engine + 1) * ranks])
        ]

    async def _finish(self, work: Sequence[asyncio.Future[Any]]) -> None:
        """Wait for all of the work even if a part fails. Cancelling this call does not cancel the work."""
        self._memory_users = work
        await asyncio.wait(work)
        for each in work:
            each.result()

    # -- the end ----------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for replica in self._replicas:
                    tasks.create_task(replica.run())
        except ExceptionGroup as several:  # a process could not be started
            self._lost(ServiceStopped(f"the inference engine broke: {several.exceptions[0]}"))

    def _lost(self, failure: AsyncRLError) -> None:
        """Stop all engines: an engine needs all its ranks, and the worker is restarted as a whole."""
        if not self._ended.done():
            self._ended.set_exception(failure)
            self._ended.exception()  # retrieved: without `watch` it is raised by generate and __aexit__
            self._end_processes()

    def _end_processes(self) -> None:
        for replica in self._replicas:
            replica.kill()
            replica.release(self._stopped())

    async def _close(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
        self._end_processes()
        await asyncio.wait([self._running])
        self._weights.close()
        self._folder.cleanup()

    def _raise_if_stopped(self) -> None:
        if self._ended.done():
            raise self._stopped()

    def _stopped(self) -> BaseException:
        failure = self._ended.exception()
        return failure if failure is not None else ServiceStopped("the inference engine is closed")
