"""A learner's end of the wire over many versions."""

from __future__ import annotations

import torch

from async_rl.config import WireConfig
from async_rl.parameter_spec import ParameterSpec
from async_rl.transport.depot import Depot, agree_on_layout
from async_rl.transport.digest import specs_of
from async_rl.transport.meeting import Meeting
from async_rl.transport.plan import Box


def test_a_long_run_does_not_fill_the_store() -> None:
    wire = WireConfig(rendezvous_timeout_s=5)
    tensors = {"weight": torch.randn(3, 4)}
    held = {Box.whole(spec): tensors[spec.name] for spec in specs_of(tensors)}
    meeting = Meeting.open(wire.host, wire.rendezvous_timeout_s)
    depot = Depot(
        meeting, agree_on_layout(meeting, specs_of(tensors), list(held), rank=0, ranks=1), 0, torch.device("cpu"), wire
    )
    depot.pack(0, held)
    before = meeting.store.num_keys()
    for version in range(1, 200):
        depot.pack(version, held, keep=[7])  # pinned
    assert meeting.store.num_keys() < before + 100
    known = [version for version in range(200) if meeting.has(version)]
    assert known[0] == 7
    assert known[1:] == [*range(known[1], 200)]
    assert len(depot.digest(7)) > 0
    depot.close()


def test_the_layout_of_a_model_of_many_experts_gets_through_the_store() -> None:
    experts = [(layer, expert) for layer in range(100) for expert in range(384)]
    specs = [
        ParameterSpec(name=f"decoder.layers.{layer}.mlp.experts.{expert}.linear_fc1.weight", shape=(8, 4), dtype="bfloat16")
        for layer, expert in experts
    ]
    meeting = Meeting.open("127.0.0.1", 5)
    layout = agree_on_layout(meeting, specs, [Box.whole(spec) for spec in specs], rank=0, ranks=1)
    assert len(layout.to_json()) > 8 << 20, "more than a value may have"
    assert meeting.again().layout() == layout
    meeting.post_held(1, [Box.whole(spec) for spec in specs])
    assert len(meeting.held(1)) == len(specs)
