"""The weight wire: a push between two processes that share a GPU, and a group of one over NCCL that breaks and is rebuilt."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Event

import torch
from weights import PipeBoard

from async_rl.config import WireConfig
from async_rl.protocols import Member
from async_rl.transport.digest import digest_of, specs_of
from async_rl.transport.gpus import gpu_of
from async_rl.transport.plan import plan_transfers
from async_rl.transport.receiver import WeightReceiver
from async_rl.transport.sender import WeightSender
from async_rl.transport.wire_process_group import Meeting, Seat, Timeouts, link, send_weights
from async_rl.types import VersionRecord
from gpu_checks.report import Checks, Machine, Report

WIRE = WireConfig()
TIMEOUTS = Timeouts(rendezvous_s=30.0, operation_s=10.0)
PUSHES = 3


def tensors(device: torch.device, mib: int, seed: int) -> dict[str, torch.Tensor]:
    """Half of it in one matrix, the rest in smaller ones, and as many vectors."""
    generator = torch.Generator().manual_seed(seed)
    found = {"embedding": torch.randn(mib * (1 << 18) // 1024, 1024, generator=generator).bfloat16().to(device)}
    for layer in range(8):
        found[f"{layer}.matrix"] = torch.randn(mib * (1 << 18) // 8192, 1024, generator=generator).bfloat16().to(device)
        found[f"{layer}.norm"] = torch.randn(1024, generator=generator).to(device)
    return found


def push(machine: Machine, report: Report) -> None:
    """Learner and worker on one device: NCCL refuses that, so the bytes go over gloo, through host memory."""
    mib = 512 if machine.is_gpu else 16
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_worker, args=(theirs, str(machine.device), mib), daemon=True)
    process.start()
    try:
        asyncio.run(_push(machine, report, ours, mib))
    finally:
        process.kill()
        process.join()
    report.note(not_shown="a push between several GPUs over NCCL: one GPU cannot hold two ranks")


def _worker(pipe: Connection, device_name: str, mib: int) -> None:
    torch.set_num_threads(1)
    asyncio.run(_receive(pipe, torch.device(device_name), mib))


async def _receive(pipe: Connection, device: torch.device, mib: int) -> None:
    board = PipeBoard(pipe)
    member = Member(id="worker", host="localhost", version=-1, device=str(device), gpu=gpu_of(device))

    async def swap(version: int, arrived: Mapping[str, torch.Tensor]) -> None:
        devices = {tensor.device for tensor in arrived.values()}
        await board.post("served", {"version": version, "digest": digest_of(arrived), "is_there": devices == {device}})

    async with asyncio.TaskGroup() as services:
        services.create_task(board.listen())
        await WeightReceiver(board, member, specs_of(tensors(device, mib, 0)), WIRE, lease_s=60).run(swap)


async def _push(machine: Machine, report: Report, pipe: Connection, mib: int) -> None:
    board = PipeBoard(pipe)
    seconds: list[float] = []
    num_bytes = 0
    async with asyncio.TaskGroup() as services:
        listening = services.create_task(board.listen())
        async with WeightSender(board, WIRE, machine.device, fence=1) as sender:
            for version in range(PUSHES):
                pushed = tensors(machine.device, mib, version)
                record = VersionRecord(version=version, timeline="", step=version, digest=digest_of(pushed))
                await sender.needed(version)
                outcome = await sender.push(record, pushed)
                report.require(outcome.staged == ("worker",), f"the push was not staged: {dict(outcome.dropped)}")
                await sender.flip(record)
                served = await _served(board, version)
                report.require(served == {"version": version, "digest": record.digest, "is_there": True}, f"served {served}")
                seconds.append(outcome.seconds)
                num_bytes = outcome.num_bytes
        listening.cancel()
    report.note(mib=num_bytes / 2**20, push_s=min(seconds), gb_per_s=num_bytes / min(seconds) / 1e9)


async def _served(board: PipeBoard, version: int) -> object:
    while not (found := await board.read("served", str(version), 5.0)):
        pass
    return found[0][1]


def rebuild(machine: Machine, report: Report) -> None:
    """A group of one: made, used, aborted, made again. Over NCCL on a GPU."""
    backend = "nccl" if machine.is_gpu else "gloo"
    report.note(backend=backend)
    sent = tensors(machine.device, 64 if machine.is_gpu else 4, seed=1)
    seat = Seat(rank=0, size=1, device=machine.device, backend=backend, timeouts=TIMEOUTS, released=Event())
    for name in ("first", "aborted", "rebuilt"):
        started = time.perf_counter()
        with suppress(_Struck):
            _broadcast_alone(seat, sent, strike=name == "aborted")
        report.note(**{f"{name}_ms": 1e3 * (time.perf_counter() - started)})


class _Struck(Exception):
    """What breaks a link on purpose."""


def _broadcast_alone(seat: Seat, sent: Mapping[str, torch.Tensor], *, strike: bool) -> None:
    transfers = plan_transfers(specs_of(sent), 1 << 20)
    meeting = Meeting.open("127.0.0.1", 10.0)
    try:
        with link(meeting, seat) as wire:
            send_weights(wire, transfers, sent, seat.device)
            if strike:
                raise _Struck
    finally:
        meeting.close()


CHECKS: Checks = {"push": push, "rebuild": rebuild}
