"""Moments in host memory: the same updates as without, and few of them on the device at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from async_rl.megatron import compat, host
from learner.optimizer.host_moments import HostMoments
from tests.support.repository import ROOT

assert compat  # importing it puts stand-ins in the place of CUDA's streams where there is no GPU

SIZES = ((8, 16), (16,), (64, 16), (16, 16), (3,))


def adam(*, fused: bool = True) -> torch.optim.AdamW:
    generator = torch.Generator().manual_seed(1)
    matrices, rest = (
        [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes] for sizes in (SIZES[:3], SIZES[3:])
    )
    return torch.optim.AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], lr=0.01, fused=fused)


def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def train(optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters(optimizer):
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def test_updates_are_the_same_bits() -> None:
    beside, moved = adam(), adam()
    HostMoments(moved, host.HOST, chunk_bytes=2000)

    for seed in range(3):
        train(beside, seed)
        train(moved, seed)

    assert all(map(torch.equal, parameters(beside), parameters(moved)))
    for one, other in zip(parameters(beside), parameters(moved), strict=True):
        for kind in ("exp_avg", "exp_avg_sq"):  # as checkpoints take them
            assert torch.equal(beside.state[one][kind].flatten()[1:], moved.state[other][kind].flatten()[1:])
    assert [len(group["params"]) for group in moved.param_groups] == [3, 2]


class CountedAdam(torch.optim.AdamW):
    """Counts updates in its parameter groups, as the fused optimizers of Transformer Engine and Apex do."""

    def step(self, closure: None = None) -> None:
        self.chunks = [*getattr(self, "chunks", []), [len(group["params"]) for group in self.param_groups]]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        super().step(closure)


def test_an_update_in_chunks_is_one_update() -> None:
    optimizer = CountedAdam([nn.Parameter(torch.ones(10)) for _ in range(5)], lr=0.1)
    HostMoments(optimizer, host.HOST, chunk_bytes=2 * 10 * 4 * 2)

    train(optimizer, 1)
    train(optimizer, 2)

    assert optimizer.chunks == [[2], [2], [1]] * 2
    assert optimizer.param_groups[0]["step"] == 2
    assert {optimizer.state[each]["step"].item() for each in parameters(optimizer)} == {2.0}


def test_moments_rest_in_the_same_memory() -> None:
    optimizer = adam()
    HostMoments(optimizer, host.HOST, chunk_bytes=1000)
    train(optimizer, 0)
    homes = [optimizer.state[each]["exp_avg"].data_ptr() for each in parameters(optimizer)]
    assert len({optimizer.state[each]["exp_avg"].untyped_storage().data_ptr() for each in parameters(optimizer)}) < len(homes)

    train(optimizer, 1)

    assert [optimizer.state[each]["exp_avg"].data_ptr() for each in parameters(optimizer)] == homes


def test_two_chunks_are_on_the_device_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from memory_parts.live_tensors import LiveTensors

    moments = 2 * 1000 * 4
    with LiveTensors() as live:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1000)) for _ in range(8)], fused=True)
        HostMoments(optimizer, host.HOST, chunk_bytes=2 * moments)
        train(optimizer, 0)
        train(optimizer, 1)
        before = live.live
        live.restart()
        optimizer.step()

    assert max(live.peaks.values()) - before == 2 * (2 * moments)
