"""How much of the wire's speed a push keeps: a whole push to one worker against one flat gloo broadcast of the same bytes.

usage: python benchmarks/weights.py [--mib 256] [--rounds 5] [--json PATH]

The push includes everything that the flat broadcast leaves out: the offer and its answer, a fresh process group, the small
tensors' buckets, the digest over every byte, the report. Both run between the same two processes, one after the other in
every round; the medians are compared. The two ends speak over a pipe instead of Redis, so that only the wire is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import ProcessGroupGloo

from async_rl.config import WireConfig
from async_rl.protocols import Member
from async_rl.transport.digest import digest_of, specs_of
from async_rl.transport.receiver import WeightReceiver
from async_rl.transport.sender import WeightSender
from async_rl.types import VersionRecord

WIRE = WireConfig()


class PipeBoard:
    """The board as two processes see it that share a pipe: messages, and one member."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._logs: dict[str, list[dict[str, Any]]] = {}
        self._members: dict[str, Member] = {}
        self._news = asyncio.Condition()

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        loop.add_reader(self._pipe.fileno(), arrived.set)
        while True:
            await arrived.wait()
            arrived.clear()
            while self._pipe.poll():
                topic, message = json.loads(self._pipe.recv_bytes())
                await self._append(topic, message)

    async def announce(self, member: Member, ttl_s: float) -> None:
        await self.post("members", asdict(member))

    async def leave(self, member_id: str) -> None: ...

    async def members(self) -> list[Member]:
        return list(self._members.values())

    async def live_version(self) -> VersionRecord | None:
        return None

    async def post(self, topic: str, message: Mapping[str, Any]) -> None:
        self._pipe.send_bytes(json.dumps([topic, message]).encode())

    async def read(self, topic: str, after: str, wait_s: float) -> list[tuple[str, dict[str, Any]]]:
        log = self._logs.setdefault(topic, [])
        try:
            async with asyncio.timeout(wait_s), self._news:
                await self._news.wait_for(lambda: len(log) > int(after))
        except TimeoutError:
            return []
        return [(str(number), message) for number, message in enumerate(log, start=1) if number > int(after)]

    async def agree(self, role: str, facts: Mapping[str, str]) -> None: ...

    async def versions(self) -> list[VersionRecord]:
        return []

    async def _append(self, topic: str, message: dict[str, Any]) -> None:
        async with self._news:
            if topic == "members":
                self._members[message["id"]] = Member(**message)
            else:
                self._logs.setdefault(topic, []).append(message)
            self._news.notify_all()


def model(mib: int) -> dict[str, torch.Tensor]:
    """Shaped like a transformer: nearly all bytes in matrices, nearly all names on vectors."""
    layers = max(1, mib // 16)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(layers):
        for part in ("qkv", "projection", "up", "down"):
            tensors[f"{layer}.{part}"] = torch.randn(mib * (1 << 18) // (layers * 4))
        for part in ("norm1", "norm2", "bias1", "bias2"):
            tensors[f"{layer}.{part}"] = torch.randn(1024)
    return tensors


def flat_group(port: int, rank: int) -> Any:  # torch's stubs do not know the group's methods
    store = TCPStore("127.0.0.1", port, wait_for_workers=False)
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timedelta(seconds=60)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return ProcessGroupGloo(PrefixStore("flat", store), rank, 2, options)


def worker(pipe: Connection, port: int, mib: int, rounds: int) -> None:
    torch.set_num_threads(1)

    async def run() -> None:
        tensors = model(mib)
        flat = torch.empty(sum(tensor.numel() for tensor in tensors.values()))
        group = flat_group(port, 1)
        board = PipeBoard(pipe)

        async def swap(version: int, arrived: Mapping[str, torch.Tensor]) -> None:
            await asyncio.to_thread(lambda: group.broadcast(flat, 0).wait())

        member = Member(id="worker", host="localhost", version=-1, device="cpu")
        async with asyncio.TaskGroup() as services:
            services.create_task(board.listen())
            await WeightReceiver(board, member, specs_of(tensors), WIRE, lease_s=60).run(swap)

    asyncio.run(run())


async def measure(pipe: Connection, group: Any, mib: int, rounds: int) -> dict[str, float]:
    tensors = model(mib)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    board = PipeBoard(pipe)
    pushes: list[float] = []
    broadcasts: list[float] = []
    async with asyncio.TaskGroup() as services:
        listening = services.create_task(board.listen())
        async with WeightSender(board, WIRE, "cpu", fence=1) as sender:
            for version in range(rounds + 1):
                await sender.needed(version)
                record = VersionRecord(version=version, timeline="", step=version, digest=digest_of(tensors))
                report = await sender.push(record, tensors)
                assert report.staged == ("worker",), report
                pushes.append(report.seconds)
                await sender.flip(record)
                # The worker meets these broadcasts inside its swap, so both kinds of transfer alternate.
                started = time.monotonic()
                await asyncio.to_thread(lambda: group.broadcast(flat, 0).wait())
                broadcasts.append(time.monotonic() - started)
        listening.cancel()
    push_s, flat_s = statistics.median(pushes[1:]), statistics.median(broadcasts[1:])  # the first round warms both
    return {
        "mib": mib,
        "push_s": push_s,
        "flat_gloo_s": flat_s,
        "push_gb_s": flat.numel() * 4 / push_s / 1e9,
        "flat_gloo_gb_s": flat.numel() * 4 / flat_s / 1e9,
        "push_vs_flat_gloo": flat_s / push_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=worker, args=(theirs, server.port, arguments.mib, arguments.rounds), daemon=True
    )
    process.start()
    try:
        result = asyncio.run(measure(ours, flat_group(server.port, 0), arguments.mib, arguments.rounds))
    finally:
        process.kill()
        process.join()
    for name, value in result.items():
        print(f"{name:20} {value:.3f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
