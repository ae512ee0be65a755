"""Checkpoints are written beside the training: every rank copies its pieces, and a thread of its own does the rest.

    rank 0    copy ──▶ trains on                        rank 1+   copy ──▶ trains on
    thread      └──▶ open ─┬─▶ write ─┬─▶ complete      thread      └───────┬─▶ write ─┐
                           └──────────┴──────────── all threads ────────────┴──────────┘

The threads meet in a process group of their own, for which the training does not wait. What can fail on one rank alone,
writing files, fails on all of them: then there is no checkpoint, and older ones are untouched.
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
from async_rl.transport.wire.gloo import closed_listeners
from learner.lost_peers import naming_lost_peers

_ROOM = 1024
"""Bytes that one rank says to the others at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A checkpoint that is durable."""

    bytes: int
    """Of all ranks' files."""
    seconds: float
    """From the copies to durability."""


Complete = Callable[[dict[str, FileFacts]], None]
"""What rank 0 does when all files are there."""


class CheckpointWriter:
    """One rank's. Every rank makes one, and begins the same checkpoints in the same order."""

    def __init__(self) -> None:
        with closed_listeners():
            self._group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._under_way: Future[Written] | None = None
        self._pinned: dict[str, Tensor] = {}
        """Host memory that a GPU copies into quickly. Taking it is slow, so it is kept."""

    def begin(self, draft: Draft, tensors: Mapping[str, Tensor], complete: Complete) -> Future[Written]:
        """When it returns, training may change the tensors. It waits for the checkpoint before this one."""
        if self._under_way is not None:
            wait([self._under_way])
        copies = {name: self._room(name, tensor).copy_(tensor, non_blocking=True) for name, tensor in tensors.items()}
        if self._pinned:
            torch.cuda.synchronize()
        self._under_way = self._thread.submit(self._write, draft, copies, complete, time.monotonic())
        return self._under_way

    def close(self) -> None:
        """Waits for the checkpoint that is under way."""
        self._thread.shutdown()

    def _room(self, name: str, like: Tensor) -> Tensor:
        if not like.is_cuda:
            return torch.empty_like(like)
        if name not in self._pinned:
            self._pinned[name] = torch.empty_like(like, device="cpu", pin_memory=True)
        return self._pinned[name]

    def _write(self, draft: Draft, tensors: Mapping[str, Tensor], complete: Complete, since: float) -> Written:
        rank = dist.get_rank()
        leads = rank == 0
        try:
            self._together("begin a checkpoint", draft.open if leads else lambda: None)
            everybodys = self._together("write a checkpoint", lambda: draft.write(rank, tensors).model_dump())
            files = {file_of(each): FileFacts(**facts) for each, facts in enumerate(everybodys)}
            if leads:
                complete(files)
        except OSError as error:
            raise _failed("complete a checkpoint", [str(error)]) from error
        finally:
            if leads:
                draft.discard()
        return Written(bytes=sum(each.bytes for each in files.values()), seconds=time.monotonic() - since)

    def _together(self, what: str, act: Callable[[], object]) -> list[Any]:
        """What `act` returned on every rank."""
        try:
            said = {"done": act()}
        except OSError as error:
            said = {"failed": f"rank {dist.get_rank()}: {error}"[: _ROOM // 4]}
        everybody = self._exchange(said)
        if failures := [each["failed"] for each in everybody if "failed" in each]:
            raise _failed(what, failures)
        return [each["done"] for each in everybody]

    def _exchange(self, said: Mapping[str, object]) -> list[dict[str, Any]]:
        packed = msgpack.packb(said)
        assert packed is not None
        own = torch.frombuffer(bytearray(packed.ljust(_ROOM, _NOTHING)), dtype=torch.uint8)
        heard = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        with naming_lost_peers():
            dist.all_gather(heard, own, group=self._group)
        return [msgpack.unpackb(each.numpy().tobytes().rstrip(_NOTHING)) for each in heard]


_NOTHING = b"\xc1"
"""Which msgpack never writes."""


def _failed(what: str, reasons: list[str]) -> CheckpointError:
    return CheckpointError(f"could not {what}: {'; '.join(reasons)}; older checkpoints are untouched")
