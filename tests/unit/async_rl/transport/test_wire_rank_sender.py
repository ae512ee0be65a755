"""A learner's end of the wire over many versions, and what it leaves on the board."""

from __future__ import annotations

import json
import zlib

import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from async_rl.config import WireConfig
from async_rl.models.parameter_spec import ParameterSpec
from async_rl.replay_protocol import Limits
from async_rl.transport.digest import specs_of
from async_rl.transport.packed_source import LAYOUT_NOTE, PACKED_NOTE, PackedSource, read_source, write_layout, write_source
from async_rl.transport.plan import Box, plan_layout
from async_rl.transport.sending.rank_orders import WireOrders
from async_rl.transport.sending.rank_sender import RankSender
from async_rl.transport.wire.rendezvous import WireRendezvous
from buffer.reference.memory_board import MemoryBoard
from buffer.reference.memory_buffer import MemoryBuffer
from tests.support.waiting import PATIENCE_S

LIMITS = Limits(groups_per_step=1, max_age=1, lease_s=60, max_attempts=1)


def test_a_long_run_remembers_what_it_still_needs() -> None:
    wire = WireConfig(rendezvous_timeout_s=5)
    tensors = {"weight": torch.randn(3, 4)}
    held = {Box.whole(spec): tensors[spec.name] for spec in specs_of(tensors)}
    layout = plan_layout(specs_of(tensors), {0: list(held)})
    store = HashStore()
    rank_sender = RankSender(
        WireRendezvous.listening_at(wire.host, store), WireOrders(store, 0, fence=1), layout, 0, torch.device("cpu"), wire
    )
    for version in range(200):
        rank_sender.pack_parcel(version, held, keep=[7, version - 1])
        assert len(rank_sender.begin_digest(version).result(PATIENCE_S)) > 0
    assert set(rank_sender.packed) == {7, 198, 199}, "7 is pinned"
    rank_sender.close()


async def test_the_layout_of_a_model_of_many_experts_gets_through_the_board() -> None:
    experts = [(layer, expert) for layer in range(100) for expert in range(384)]
    specs = [
        ParameterSpec(name=f"decoder.layers.{layer}.mlp.experts.{expert}.linear_fc1.weight", shape=(8, 4), dtype="bfloat16")
        for layer, expert in experts
    ]
    layout = plan_layout(specs, {0: [Box.whole(spec) for spec in specs]})
    assert len(layout.to_json()) > 8 << 20
    board, fence = await board_with_a_learner()
    await write_layout(board, layout, fence=fence)
    await write_source(board, PackedSource(fence=fence, host="127.0.0.1", layout=layout, deltas="parallel", versions={}))
    source = await read_source(board)
    assert source is not None
    assert source.layout == layout
    assert len(await board.note(LAYOUT_NOTE) or b"") < 2 << 20


async def test_what_is_no_note_of_the_learners_is_nothing() -> None:
    board, fence = await board_with_a_learner()
    specs = [ParameterSpec(name="weight", shape=(3,), dtype="float32")]
    layout = plan_layout(specs, {0: [Box.whole(specs[0])]})
    await write_layout(board, layout, fence=fence)
    await write_source(board, PackedSource(fence=fence, host="127.0.0.1", layout=layout, deltas="parallel", versions={}))
    good = await board.note(PACKED_NOTE)
    assert good is not None
    for text in (b"", b"not compressed", good[:-3], zlib.compress(b"[1]"), zlib.compress(b"{" * 10_000)):
        await board.write_note(PACKED_NOTE, text, 60, fence=fence)
        assert await read_source(board) is None
    await board.write_note(PACKED_NOTE, good, 60, fence=fence)
    assert await read_source(board) is not None
    await board.write_note(PACKED_NOTE, b"of another learner", 60, fence=fence + 1)
    assert await read_source(board) is not None, "a note with another fence is not written"
    forged = PackedSource(fence=fence + 10**12, host="127.0.0.1", layout=layout, deltas="parallel", versions={})
    await board.write_note(PACKED_NOTE, zlib.compress(dumped(forged)), 60, fence=fence)
    assert await read_source(board) is None, "only the buffer says who the learner is"


def dumped(source: PackedSource) -> bytes:
    said = {"fence": source.fence, "host": source.host, "layout": source.layout.digest, "versions": {}}
    return json.dumps(said).encode()


async def board_with_a_learner() -> tuple[MemoryBoard, int]:
    buffer = MemoryBuffer()
    return MemoryBoard(buffer), await buffer.acquire("test", LIMITS)
