"""Checks of the weight wire: two processes that share a GPU, and an NCCL group of one that is aborted and rebuilt."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from threading import Event
from typing import Any, Literal

import torch
from torch.distributed import HashStore
from weights_parts.learner import learner
from weights_parts.pipe_board import PipeBoard

from async_rl.config import WireConfig
from async_rl.models.parameter_spec import ParameterSpec
from async_rl.protocols import Member
from async_rl.transport.delta.parcel_delta import encoding_of
from async_rl.transport.digest import digest_of, specs_of
from async_rl.transport.messages import TO_LEARNER
from async_rl.transport.parcel_transfer import compile_deltas
from async_rl.transport.receiving.receiver import WeightReceiver
from async_rl.transport.wire.cuda_ipc import describe, open_handle
from async_rl.transport.wire.gpus import gpus_of
from async_rl.transport.wire.process_group import GroupPlace, LinkPool, broadcast_whole
from async_rl.transport.wire.rendezvous import WireRendezvous
from gpu_checks.report import Checks, Machine, Report

TIMEOUTS = WireConfig(rendezvous_timeout_s=30.0, operation_timeout_s=10.0)
PUSHES = 3


def tensors(device: torch.device, mib: int, seed: int) -> dict[str, torch.Tensor]:
    """Return parameters: half of the elements in one matrix, the rest in smaller matrices, and as many vectors."""
    generator = torch.Generator().manual_seed(seed)
    found = {"embedding": torch.randn(mib * (1 << 18) // 1024, 1024, generator=generator).bfloat16().to(device)}
    for layer in range(8):
        found[f"{layer}.matrix"] = torch.randn(mib * (1 << 18) // 8192, 1024, generator=generator).bfloat16().to(device)
        found[f"{layer}.norm"] = torch.randn(1024, generator=generator).to(device)
    return found


def push_in_place(machine: Machine, report: Report) -> None:
    """Push between learner and worker on one device, which reads the weights where the learner packed them."""
    _push_to_process(machine, report, is_shared=True)


def push_gloo(machine: Machine, report: Report) -> None:
    """The same over gloo, through host memory."""
    _push_to_process(machine, report, is_shared=False)
    report.note(not_shown="a push between several GPUs over NCCL, which refuses two ranks on one GPU")


def push_deltas(machine: Machine, report: Report) -> None:
    """The same as deltas, which are made and applied where the weights lie."""
    _compile(machine.device)
    _push_to_process(machine, report, is_shared=False, deltas="always")


def _compile(device: torch.device) -> None:
    if encoding_of(device) == "compact":
        compile_deltas()


def _push_to_process(machine: Machine, report: Report, *, is_shared: bool, deltas: Literal["always", "off"] = "off") -> None:
    mib = 512 if machine.is_gpu else 16
    wire = WireConfig(shared_memory=is_shared, deltas=deltas, bucket_mb=64.0 if machine.is_gpu else 1.0)
    ours, theirs = multiprocessing.Pipe()
    with receiving(theirs, machine.device, specs_of(tensors(machine.device, mib, 0)), wire):
        asyncio.run(_push(machine, report, ours, mib, wire))


def cuda_ipc(machine: Machine, report: Report) -> None:
    """Open a GPU's memory in another process, which a sandbox may refuse; then pushes go over gloo."""
    data = torch.arange(1 << 20, device=machine.device, dtype=torch.int32).view(torch.uint8)
    machine.synchronize()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_open_memory, args=(theirs, str(machine.device)), daemon=True)
    process.start()
    try:
        ours.send_bytes(describe(data))
        if not ours.poll(60):
            raise TimeoutError("the other process said nothing for 60 s")
        report.note(**ours.recv())
        report.require(
            report.figures["sum"] == float(data.view(torch.int32).sum().item()), "the other process read other bytes"
        )
    finally:
        process.kill()
        process.join()


def _open_memory(pipe: Connection, device_name: str) -> None:
    device = torch.device(device_name)
    handle, started = pipe.recv_bytes(), time.perf_counter()
    opened = open_handle(handle, [device])
    assert opened is not None, "the other process is on another GPU"
    open_ms = 1e3 * (time.perf_counter() - started)
    pipe.send({"open_ms": open_ms, "sum": float(opened.view(torch.int32).sum().item())})


@contextmanager
def receiving(pipe: Connection, device: torch.device, specs: Sequence[ParameterSpec], wire: WireConfig) -> Iterator[None]:
    """Run a process that receives what is pushed over the pipe's board, and says of each version what it serves."""
    process = multiprocessing.get_context("spawn").Process(target=_worker, args=(pipe, str(device), specs, wire), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _worker(pipe: Connection, device_name: str, specs: Sequence[ParameterSpec], wire: WireConfig) -> None:
    torch.set_num_threads(1)
    if wire.deltas == "always":
        _compile(torch.device(device_name))
    asyncio.run(_receive(pipe, torch.device(device_name), specs, wire))


async def _receive(pipe: Connection, device: torch.device, specs: Sequence[ParameterSpec], wire: WireConfig) -> None:
    board = PipeBoard(pipe)
    member = Member(id="worker", host="localhost", version=-1, device=str(device), gpus=gpus_of([device]))

    async def swap(version: int, arrived: Mapping[str, torch.Tensor]) -> None:
        devices, started = {tensor.device.type for tensor in arrived.values()}, time.perf_counter()
        served = {"version": version, "digest": digest_of(arrived), "is_there": devices == {device.type}}
        await board.post("served", served | {"verify_s": time.perf_counter() - started})

    async with asyncio.TaskGroup() as services:
        services.create_task(board.listen())
        await WeightReceiver(board, await board.store(), member, specs, wire, lease_s=60).run(swap)


async def _push(machine: Machine, report: Report, pipe: Connection, mib: int, wire: WireConfig) -> None:
    board = PipeBoard(pipe)
    pack_s: list[float] = []
    push_s: list[float] = []
    verify_s: list[float] = []
    weights = tensors(machine.device, mib, 0)
    async with learner(board, wire, weights) as end:
        for version in range(PUSHES):
            weights = tensors(machine.device, mib, version) if wire.deltas == "off" else _updated(weights, version)
            pushed = await end.push(weights, workers=1)
            await end.flip(pushed)
            expected = {"version": version, "digest": digest_of(weights), "is_there": True}
            served = dict(await said(board, "served", version))
            verify_s.append(served.pop("verify_s"))
            report.require(served == expected, f"served {served}, expected {expected}")
            pack_s.append(pushed.pack_s)
            push_s.append(pushed.push_s)
            report.note(pack_s=min(pack_s), push_s=min(push_s), gb_s=mib * 2**20 / min(push_s) / 1e9, verify_s=min(verify_s))
        report.require(wire.deltas == "off" or end.num_deltas == PUSHES - 1, f"sent {end.num_deltas} of {PUSHES} as deltas")
    ready = [message["by_memory"] for _, message in await board.read(TO_LEARNER, "0", 0.0) if message["kind"] == "ready"]
    in_place = [[0] if wire.shared_memory else []] * PUSHES
    report.require(ready == in_place, f"read in place were the parcels {ready} of {PUSHES} pushes")


def _updated(weights: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Change one weight in a hundred."""
    generator = torch.Generator(next(iter(weights.values())).device).manual_seed(seed)
    return {
        name: torch.where(torch.rand(each.shape, generator=generator, device=each.device) < 0.01, each * 1.01, each)
        for name, each in weights.items()
    }


async def said(board: PipeBoard, topic: str, number: int) -> dict[str, Any]:
    while not (found := await board.read(topic, str(number), 5.0)):
        pass
    return found[0][1]


def rebuild(machine: Machine, report: Report) -> None:
    """Create a group of one, use it twice, abort it and create it again; over NCCL on a GPU."""
    backend = "nccl" if machine.is_gpu else "gloo"
    report.note(backend=backend)
    data = torch.ones((64 if machine.is_gpu else 4) << 20, dtype=torch.uint8, device=machine.device)
    rendezvous = WireRendezvous.listening_at("127.0.0.1", HashStore())
    links = LinkPool(TIMEOUTS)
    for name, group in (("first", "1"), ("again", "1"), ("aborted", "1"), ("rebuilt", "2")):
        place = GroupPlace(group=group, rank=0, size=1, device=machine.device, backend=backend)
        started = time.perf_counter()
        with suppress(_Struck), links.use(rendezvous, place, Event()) as link:
            broadcast_whole(link, data, 1 << 20)
            if name == "aborted":
                raise _Struck
        report.note(**{f"{name}_ms": 1e3 * (time.perf_counter() - started)})
    links.close()


class _Struck(Exception):
    """Raised to break a link on purpose."""


CHECKS: Checks = {
    "cuda ipc": cuda_ipc,
    "push in place": push_in_place,
    "push gloo": push_gloo,
    "push deltas": push_deltas,
    "rebuild": rebuild,
}
