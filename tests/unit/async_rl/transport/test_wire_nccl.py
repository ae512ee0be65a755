"""How NCCL groups are built, closed and given up, as far as that shows without GPUs: torch's groups are played by fakes."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist

from async_rl.config import WireConfig
from async_rl.errors import WireError
from async_rl.transport.messages import Backend
from async_rl.transport.wire import nccl
from async_rl.transport.wire.process_group import GroupPlace, Link
from tests.support.waiting import PATIENCE_S

SOON = timedelta(seconds=7)


class Group:
    """Stands for torch's: its operations never end, and its abort ends when told."""

    def __init__(self) -> None:
        self.may_end = Event()
        self.has_ended = Event()

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> Any:
        return self

    def is_completed(self) -> bool:
        return False

    def abort(self) -> None:
        self.may_end.wait(PATIENCE_S)
        self.has_ended.set()
        raise RuntimeError("Future for ProcessGroup abort timed out")

    def shutdown(self) -> None:
        raise RuntimeError("NCCL error: remote process exited or there was a network error")


def link(group: Group, backend: Backend, *, abandoned: bool = False) -> Link:
    place = GroupPlace(group="1/1/0", rank=1, size=2, device=torch.device("cpu"), backend=backend)
    gone = Event()
    if abandoned:
        gone.set()
    return Link(group, place, WireConfig(), gone)


def test_what_nccl_may_still_write_to_is_kept_until_its_kernels_have_stopped() -> None:
    group, before = Group(), threading.enumerate()
    data = torch.zeros(8)
    is_kept = weakref.ref(data)
    one = link(group, "nccl", abandoned=True)
    with pytest.raises(WireError, match="not complete"):
        one.wait(one.broadcast(data))
    one.abort(within_s=0.0)
    assert not group.has_ended.is_set(), "the caller has not waited for it"
    del one, data
    gc.collect()
    assert is_kept() is not None
    [aborting] = [thread for thread in threading.enumerate() if thread not in before and thread.name == "weight-abort"]
    group.may_end.set()
    aborting.join(PATIENCE_S)
    gc.collect()
    assert is_kept() is None


def test_a_group_with_a_dead_member_is_closed_without_asking_it() -> None:
    group = Group()
    group.may_end.set()
    link(group, "nccl").close()
    assert group.has_ended.is_set()
    with pytest.raises(WireError, match="a process group cannot be closed: NCCL error: remote process exited"):
        link(group, "gloo").close()


def test_one_group_at_a_time_is_built_without_a_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(nccl.BLOCKING_WAIT, raising=False)
    monkeypatch.delenv(nccl.NONBLOCKING_TIMEOUT, raising=False)
    inside, may_leave = Event(), Event()
    seen: list[str] = []

    def build() -> None:
        with nccl.without_watchdog(SOON):
            seen.append(os.environ[nccl.BLOCKING_WAIT])
            inside.set()
            assert may_leave.wait(PATIENCE_S)

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert inside.wait(PATIENCE_S)
    assert seen == ["1"]
    may_leave.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert seen == ["1", "1"]
    assert os.environ[nccl.BLOCKING_WAIT] == "0", "Megatron's groups keep their watchdog"
    assert os.environ[nccl.NONBLOCKING_TIMEOUT] == "7"


@pytest.mark.parametrize("chosen", ["0", "1"])
def test_what_the_user_has_chosen_stays(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nccl.BLOCKING_WAIT, chosen)
    monkeypatch.setenv(nccl.NONBLOCKING_TIMEOUT, "99")
    with suppress(ZeroDivisionError), nccl.without_watchdog(SOON):
        assert os.environ[nccl.BLOCKING_WAIT] == "1"
        raise ZeroDivisionError
    assert (os.environ[nccl.BLOCKING_WAIT], os.environ[nccl.NONBLOCKING_TIMEOUT]) == (chosen, "99")


def test_torch_reads_the_variable() -> None:
    headers = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d"
    assert f'"{nccl.BLOCKING_WAIT}"' in (headers / "ProcessGroupNCCL.hpp").read_text()
    assert "nccl_nonblocking_timeout()" in (headers / "NCCLUtils.hpp").read_text()


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of torch has no NCCL")
def test_torch_has_the_options_that_a_group_is_built_with() -> None:
    kind: Any = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = SOON
    options.config.blocking = 0
    assert (options._timeout, options.config.blocking) == (SOON, 0)
    assert all(callable(getattr(kind, name)) for name in ("broadcast", "allreduce", "abort"))
