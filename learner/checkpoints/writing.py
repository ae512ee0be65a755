"""Write checkpoints while training goes on: every rank copies its pieces, and a background thread writes them.

    rank 0    copy ──▶ next step                        rank 1+   copy ──▶ next step
    thread      └──▶ open ─┬─▶ write ─┬─▶ complete      thread      └───────┬─▶ write ─┐
                           └──────────┴──────────── all threads ────────────┴──────────┘

The threads use a process group of their own, so training does not wait for them. If writing fails on one rank it fails on
all: then there is no new checkpoint, and older ones are untouched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.checkpoints.draft import Draft
from async_rl.checkpoints.manifest import FileFacts, file_of
from async_rl.errors import CheckpointError
from async_rl.megatron.parallel import GROUP_TIMEOUT
from async_rl.supervision import working
from async_rl.transport.wire.gloo import closed_listeners
from learner.collectives import gather_bytes
from learner.lost_peers import naming_lost_peers
from learner.pinned_memory import PinnedMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A checkpoint that is durable."""

    bytes: int
    """Size of all ranks' files."""
    seconds: float
    """From the copies until it was durable."""


Complete = Callable[[dict[str, FileFacts]], None]
"""Called on rank 0 when all files are written; it commits the checkpoint."""


class CheckpointWriter:
    """One rank's writer. Every rank constructs one and begins the same checkpoints in the same order."""

    def __init__(self) -> None:
        with closed_listeners():
            self._group: Any = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._under_way: Future[Written] | None = None
        self._pinned = PinnedMemory()
        """For copies from a GPU."""

    def begin(self, draft: Draft, tensors: Mapping[str, Tensor], complete: Complete) -> Future[Written]:
        """Copy the tensors and write them in the background; then training may continue. Waits for the previous checkpoint."""
        if self._under_way is not None:
            wait([self._under_way])
        of_gpus = {name: tensor for name, tensor in tensors.items() if tensor.is_cuda}
        copies = {name: self._pinned.home(name, tensor).copy_(tensor, non_blocking=True) for name, tensor in of_gpus.items()}
        if of_gpus:
            torch.cuda.synchronize()  # until then the last update may still bring offloaded moments to the host
        copies |= {name: tensor.clone() for name, tensor in tensors.items() if name not in of_gpus}
        self._under_way = self._thread.submit(working("a checkpoint")(self._write), draft, copies, complete, time.monotonic())
        return self._under_way

    def close(self) -> None:
        """Wait for the checkpoint that is under way."""
        self._thread.shutdown()

    def _write(self, draft: Draft, tensors: Mapping[str, Tensor], complete: Complete, since: float) -> Written:
        rank = dist.get_rank()
        leads = rank == 0
        try:
            self._on_all_ranks("begin a checkpoint", draft.open if leads else lambda: None)
            facts_of_ranks = self._on_all_ranks("write a checkpoint", lambda: draft.write(rank, tensors).model_dump())
            files = {file_of(each): FileFacts(**facts) for each, facts in enumerate(facts_of_ranks)}
            if leads:
                complete(files)
        except OSError as error:
            raise _failed("complete a checkpoint", [str(error)]) from error
        finally:
            if leads:
                draft.discard()
        return Written(bytes=sum(each.bytes for each in files.values()), seconds=time.monotonic() - since)

    def _on_all_ranks(self, what: str, act: Callable[[], object]) -> list[Any]:
        """Return what `act` returned on every rank. Raises CheckpointError if it raised OSError on any."""
        try:
            message = {"done": act()}
        except OSError as error:
            message = {"failed": f"rank {dist.get_rank()}: {error}"}
        packed = msgpack.packb(message)
        assert packed is not None
        with naming_lost_peers():
            outcomes: list[dict[str, Any]] = [msgpack.unpackb(each) for each in gather_bytes(packed, self._group)]
        if failures := [each["failed"] for each in outcomes if "failed" in each]:
            raise _failed(what, failures)
        return [each["done"] for each in outcomes]


def _failed(what: str, reasons: list[str]) -> CheckpointError:
    return CheckpointError(f"could not {what}: {'; '.join(reasons)}; older checkpoints are untouched")
