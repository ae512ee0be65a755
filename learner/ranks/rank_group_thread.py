"""Runs the rank group on a thread of its own, so that the loop can await it. All of torch runs on this thread (CUDA devices are
per thread).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from pydantic import TypeAdapter

from async_rl.config import Config
from async_rl.errors import ServiceStopped
from async_rl.megatron.parallel import Rendezvous
from async_rl.models.shape import ModelShape
from async_rl.protocols import GroupStores
from async_rl.transport.sending.rank_sender import RankSender
from async_rl.types import BufferPosition
from learner.batches.batch import PackedBatch
from learner.checkpoints.writing import Written
from learner.lost_peers import naming_lost_peers
from learner.objective import Objective
from learner.progress import Progress
from learner.ranks.orders import KeepAlive, OpenSender, PackCheckpoint, PackVersion
from learner.ranks.rank_group import RankGroup
from learner.step import StepResult

POSITION = TypeAdapter(BufferPosition)
"""As a checkpoint's JSON."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The position of a loaded checkpoint."""

    step: int
    position: BufferPosition | None
    """The buffer's position; None for an imported model."""


class RankGroupThread:
    def __init__(self, rank_group: RankGroup, thread: ThreadPoolExecutor, *, folder: Path, keep: int, life: int):
        self._rank_group, self._thread = rank_group, thread
        self._folder, self._keep, self._life = folder, keep, life
        self.learning_rate_scale = 1.0
        """Factor on the schedule's learning rate; the guard sets it."""
        self.extra_state: dict[str, Any] = {}
        """Extra state that is saved with every checkpoint."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: Config,
        objective: Objective,
        shape: ModelShape,
        stores: GroupStores,
        *,
        life: int,
        meet: Callable[[], Rendezvous | None],
    ) -> AsyncIterator[RankGroupThread]:
        """Start the thread and join the other ranks. `life`: the fence, which marks its checkpoints. `meet` may block."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute") as thread:
            loop = asyncio.get_running_loop()
            rank_group = await loop.run_in_executor(thread, lambda: RankGroup(config, objective, shape, stores, meet()))
            try:
                folder, keep = config.run_folder / "checkpoints", config.learner.keep_checkpoints
                yield cls(rank_group, thread, folder=folder, keep=keep, life=life)
            finally:
                await loop.run_in_executor(thread, _stop, rank_group)

    @property
    def device(self) -> str:
        return str(self._rank_group.device)

    @property
    def num_shards(self) -> int:
        return self._rank_group.num_shards

    async def step(self, batch: PackedBatch) -> StepResult:
        return await self._call(self._rank_group.step, batch, learning_rate_scale=self.learning_rate_scale)

    async def open_sender(self) -> RankSender:
        """Prepare all ranks to send weights; return rank 0's sender."""
        return await self._call(self._rank_group.run, OpenSender(fence=self._life))

    async def pack_version(self, version: int, keep: Collection[int]) -> Future[str]:
        """Copy the current weights to be sent, keeping the versions `keep`. Returns the digest, which is computed meanwhile."""
        return await self._call(self._rank_group.run, PackVersion(version=version, keep=sorted(keep)))

    async def pack_checkpoint(self, version: int, keep: Collection[int], checkpoint: Path) -> Future[str] | None:
        """Pack the weights of a checkpoint instead. Returns None if it cannot be read."""
        order = PackCheckpoint(version=version, keep=sorted(keep), checkpoint=str(checkpoint))
        return await self._call(self._rank_group.run, order)

    async def save(
        self, progress: Progress, position: BufferPosition, still_ours: Callable[[], Awaitable[None]]
    ) -> Awaitable[Written]:
        """Begin a checkpoint; the returned awaitable ends when it is durable.

        `still_ours` is awaited after all files are written and before the manifest. It raises if another learner took over,
        so that a paused learner cannot leave a checkpoint to its successor.
        """
        loop = asyncio.get_running_loop()

        def confirm() -> None:
            asyncio.run_coroutine_threadsafe(_awaited(still_ours()), loop).result()

        extra = {
            "step": progress.step,
            "version": progress.version,
            "timeline": progress.timeline,
            "fence": self._life,
            "position": POSITION.dump_python(position, mode="json"),
            "beside": dict(self.extra_state),
        }
        saving = await self._call(
            self._rank_group.save,
            self._folder,
            step=progress.step,
            keep=self._keep,
            life=self._life,
            extra=extra,
            confirm=confirm,
        )
        return asyncio.wrap_future(saving)

    async def load(self) -> Resumed | None:
        """Restore the newest undamaged checkpoint; None if there is none."""
        extra: Mapping[str, Any] | None = await self._call(self._rank_group.load, self._folder)
        if extra is None:
            return None
        position = POSITION.validate_python(extra["position"]) if "position" in extra else None
        self.extra_state = dict(extra.get("beside", {}))
        return Resumed(step=extra.get("step", 0), position=position)

    async def idle(self) -> None:
        """Keep the other ranks waiting: call it well within parallel.GROUP_TIMEOUT of the last order."""
        await self._call(self._rank_group.run, KeepAlive())

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on the thread. A cancelled caller still waits for it: a step cannot be left half done."""

        def run() -> T:
            with naming_lost_peers():
                return function(*args, **kwargs)

        call = asyncio.get_running_loop().run_in_executor(self._thread, run)
        cancelled: asyncio.CancelledError | None = None
        while not call.done():
            try:
                await asyncio.wait([call])
            except asyncio.CancelledError as error:  # every enclosing task group may cancel once more
                cancelled = error
        if cancelled is not None:
            if not call.cancelled():
                call.exception()  # retrieved, so that asyncio does not report it as never retrieved
            raise cancelled
        return call.result()


def _stop(rank_group: RankGroup) -> None:
    with suppress(ServiceStopped), naming_lost_peers():  # lost ranks need no order to stop
        rank_group.stop()


async def _awaited(result: Awaitable[None]) -> None:
    await result
