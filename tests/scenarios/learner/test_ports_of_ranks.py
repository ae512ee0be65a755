"""Ranks of a learner, once they are joined: no port of theirs is open, and their groups work."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from tests.support.listening import IS_TOLD, listeners
from tests.support.warm_processes import play_ranks

pytestmark = pytest.mark.skipif(not IS_TOLD, reason="needs Linux to tell which ports a process has")


def play(rank: int, file: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

    from async_rl.megatron import parallel
    from async_rl.transport.wire.gloo import closed_listeners
    from learner.checkpoints.writing import CheckpointWriter

    rendezvous = parallel.Rendezvous(store=FileStore(file, 2), rank=rank, world_size=2)
    ours = socket.create_server(("127.0.0.1", 0))  # somebody else's listener stays
    parallel.initialize(device=torch.device("cpu"), tensor=2, rendezvous=rendezvous)
    writer = CheckpointWriter()
    assert listeners(os.getpid()) == [ours.getsockname()]
    before = num_descriptors()
    with closed_listeners():
        pass
    assert num_descriptors() == before, "looking for listeners opens nothing that stays"
    socket.create_connection(ours.getsockname()).close()
    total = torch.ones(2)
    for group in (None, parallel.tensor_group(), parallel.data_group()):
        dist.all_reduce(total, group=group)
    assert total.tolist() == [4, 4]
    del writer
    parallel.shutdown()


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_ranks_that_are_joined_listen_no_more(tmp_path: Path) -> None:
    play_ranks("tests.scenarios.learner.test_ports_of_ranks", tmp_path / "meeting")


if __name__ == "__main__":
    play(int(sys.argv[2]), sys.argv[1])
