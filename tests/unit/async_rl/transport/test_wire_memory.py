"""A sender's memory is read in place by processes that may, and is not overwritten meanwhile."""

from __future__ import annotations

import json
import os
import weakref
from unittest.mock import Mock

import pytest
import torch

from async_rl.transport.wire import cuda_ipc, shared_memory
from async_rl.transport.wire.shared_memory import MappedMemories, MappedMemory, ParcelMemory

CPU = torch.device("cpu")


def test_a_reader_sees_the_bytes_and_keeps_them() -> None:
    memory = ParcelMemory(4096, CPU, shared=True)
    memory.data[:] = torch.arange(4096, dtype=torch.int64).to(torch.uint8)
    reader = MappedMemory.open(memory.address, 4096, [CPU])
    assert reader is not None
    assert reader.lock_shared()
    assert not memory.lock_exclusively(), "it has a reader"
    assert torch.equal(reader.data, memory.data)
    reader.unlock()
    assert memory.lock_exclusively()
    assert not reader.lock_shared(), "it is being written"
    memory.unlock()
    assert reader.lock_shared()


def test_what_a_reader_has_mapped_can_be_opened_from_it_after_the_owner_has_ended() -> None:
    memory = ParcelMemory(64, CPU, shared=True)
    memory.data[:] = 7
    reader = MappedMemory.open(memory.address, 64, [CPU])
    assert reader is not None
    address = memory.address
    del memory
    assert MappedMemory.open(address, 64, [CPU]) is None
    again = MappedMemory.open(reader.own_address, 64, [CPU])
    assert again is not None
    assert again.data.tolist() == [7] * 64


def test_memories_stay_mapped_until_their_owner_gives_them_up() -> None:
    memory, mapped = ParcelMemory(64, CPU, shared=True), MappedMemories([CPU])
    first = mapped.open(memory.address, 64)
    assert first is not None
    assert mapped.open(memory.address, 64) is first
    address, gone = memory.address, weakref.ref(first)
    del memory, first
    mapped.drop_ended()
    assert gone() is None
    assert mapped.open(address, 64) is None
    assert mapped.open("", 64) is None


def test_a_gpus_memory_is_opened_anew_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it would not be free once its owner has freed it. There is no GPU here: its memory is that of a meta tensor."""
    monkeypatch.setattr(shared_memory, "_mapped", lambda *_: torch.empty(64, dtype=torch.uint8, device="meta"))
    memory, mapped = ParcelMemory(64, CPU, shared=True), MappedMemories([CPU])
    first = mapped.open(memory.address, 64)
    assert first is not None
    assert mapped.open(memory.address, 64) not in (None, first)


def test_a_gpus_memory_cannot_be_opened_by_others_once_its_owner_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that has it open keeps it. There is no GPU here: see above."""
    monkeypatch.setattr(shared_memory, "_mapped", lambda *_: torch.empty(64, dtype=torch.uint8, device="meta"))
    memory = ParcelMemory(64, CPU, shared=True)
    reader = MappedMemory.open(memory.address, 64, [CPU])
    assert reader is not None
    assert reader.own_address != ""
    del memory
    assert reader.own_address == ""


def test_torch_is_not_left_to_count_the_readers_of_a_gpus_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep memory that none or several have opened."""
    storage = Mock()
    storage._share_cuda_.return_value = (0, b"handle", 64, 0, b"counter", 5, b"event", True)
    monkeypatch.setattr(cuda_ipc, "gpu_of", lambda _: "GPU-1")
    told = json.loads(cuda_ipc.describe(Mock(untyped_storage=lambda: storage)))
    storage._release_ipc_counter_cuda.assert_called_once_with(b"counter", 5)
    assert not any("counter" in name for name in told)


def test_what_is_not_offered_is_not_opened() -> None:
    assert ParcelMemory(64, CPU, shared=False).address == ""
    memory = ParcelMemory(64, CPU, shared=True)
    assert MappedMemory.open(memory.address, 65, [CPU]) is None, "another size"
    assert MappedMemory.open("/proc/self/exe", 64, [CPU]) is None, "no memory of ours"
    assert MappedMemory.open(f"/proc/{os.getpid()}/fd/4093", 64, [CPU]) is None, "nothing there"


@pytest.mark.parametrize("card", ["", "{}", json.dumps({"handle": 5}), None])
def test_memory_of_another_gpu_or_of_nothing_known_is_not_opened(card: str | None) -> None:
    if card is None:
        card = json.dumps({"gpu": "GPU-1", "handle": "", "num_bytes": 64, "offset": 0})
    fd = os.memfd_create("async-rl-gpu-weights", os.MFD_CLOEXEC)
    try:
        os.write(fd, card.encode())
        assert MappedMemory.open(f"/proc/{os.getpid()}/fd/{fd}", 64, [CPU]) is None
    finally:
        os.close(fd)
