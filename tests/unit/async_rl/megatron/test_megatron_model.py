"""The shared model: packing, log-probabilities, and where the stand-ins for CUDA may be used."""

import itertools
import weakref
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from async_rl.errors import ConfigError
from async_rl.megatron import host, parallel
from async_rl.megatron.compat import parallel_state
from async_rl.megatron.model import build_model, forward_packed, pack, packed_params
from async_rl.megatron.parameters.full_parameters import (
    FullParameterLoader,
    RankParts,
    Split,
    copies_for,
    held_boxes,
    join,
    load_full,
    slice_for,
    specs,
    table,
)
from async_rl.models.shape import ModelShape
from async_rl.transport import bulk_copy
from async_rl.transport.digest import specs_of
from tests.support.full_parameters import gather_full
from tests.support.operations import Operations

CPU = torch.device("cpu")
SHAPE = ModelShape(
    hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab_size=19, max_positions=64, rope_theta=1e4,
    qkv_bias=True, qk_norm=True, init_std=0.2,
)  # fmt: skip


@pytest.fixture(autouse=True)
def alone() -> None:
    parallel.initialize(device=CPU)


def model(seed: int = 1) -> torch.nn.Module:
    return build_model(SHAPE, device=CPU, dtype=torch.float32, seed=seed)


def rows(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, SHAPE.vocab_size, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (5, 1, 17), (64, 2, 1, 30)])
def test_packed_rows_are_their_sequences(lengths: tuple[int, ...]) -> None:
    """Logits and gradients of one packed row equal those of every sequence on its own, without packing."""
    packed, separate = model(), model()
    sequences = rows(*lengths)
    together = forward_packed(packed, *pack(sequences)).logits()
    alone = torch.cat([separate(row[None], torch.arange(len(row))[None], None)[0] for row in sequences])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)

    direction = torch.randn(together.shape, generator=torch.Generator().manual_seed(3))
    (together * direction).sum().backward()
    (alone * direction).sum().backward()
    for (name, left), right in zip(packed.named_parameters(), separate.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_nothing_leaks_between_packed_sequences() -> None:
    first, second, third = rows(6, 9, 4)
    shared = model()
    with torch.no_grad():
        before = forward_packed(shared, *pack([first, second, third])).logits()
        after = forward_packed(shared, *pack([first, second.flip(0), third])).logits()
    assert torch.equal(before[:6], after[:6])
    assert torch.equal(before[15:], after[15:])
    assert not torch.allclose(before[6:15], after[6:15])


def test_packed_params_find_the_longest_sequence() -> None:
    found = packed_params(torch.tensor([0, 3, 10, 11]))
    assert (found.max_seqlen_q, found.cu_seqlens_q.dtype) == (7, torch.int32)


def test_weights_depend_on_the_seed_and_on_nothing_else() -> None:
    one, again, other = (gather_full(model(seed), SHAPE) for seed in (1, 1, 2))
    assert one is not None
    assert again is not None
    assert other is not None
    for row in table(SHAPE):
        assert torch.equal(one[row.name], again[row.name])
        assert torch.equal(one[row.name], other[row.name]) == isinstance(row.initial, str)
    drawn = [tensor for tensor in one.values() if tensor.dim() == 2]
    for left, right in itertools.combinations(drawn, 2):
        assert not torch.equal(left.flatten()[:32], right.flatten()[:32])


def test_weights_that_are_loaded_later_are_not_drawn() -> None:
    drawn = model()
    with Operations() as counted:
        empty = build_model(SHAPE, device=CPU, dtype=torch.float32, seed=None)
    assert not [name for name in counted.calls if "rand" in name or "normal" in name]
    assert all(not parameter.any() for parameter in empty.parameters())
    weights = gather_full(drawn, SHAPE)
    assert weights is not None
    load_full(empty, SHAPE, weights)
    for left, right in zip(empty.parameters(), drawn.parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_snapshot_is_not_the_live_model() -> None:
    live = model()
    snapshot = gather_full(live, SHAPE)
    assert snapshot is not None
    addresses = [parameter.data_ptr() for parameter in live.parameters()]
    load_full(live, SHAPE, {name: tensor + 1 for name, tensor in snapshot.items()})
    changed = gather_full(live, SHAPE)
    assert changed is not None
    for name, tensor in snapshot.items():
        assert torch.equal(changed[name], tensor + 1), name
    assert addresses == [parameter.data_ptr() for parameter in live.parameters()]


def test_a_model_is_loaded_again_and_again_in_place() -> None:
    live = model()
    full = gather_full(live, SHAPE)
    assert full is not None
    loader, addresses = FullParameterLoader(live, SHAPE), [parameter.data_ptr() for parameter in live.parameters()]
    for number in range(1, 3):
        loader.load({name: tensor + number for name, tensor in full.items()})
        loaded = gather_full(live, SHAPE)
        assert loaded is not None
        assert all(torch.equal(loaded[name], tensor + number) for name, tensor in full.items())
    with pytest.raises(ValueError, match="do not fit the model"):
        loader.load({name: tensor for name, tensor in full.items() if tensor.dim() == 2})
    assert loader.stage(full, CPU) is full, "on a CPU the parts are where they are needed"
    loader.load(RankParts(full))
    restored = gather_full(live, SHAPE)
    assert restored is not None
    assert all(torch.equal(restored[name], tensor) for name, tensor in full.items())
    assert addresses == [parameter.data_ptr() for parameter in live.parameters()]


class Assembled(dict[str, torch.Tensor]):
    """Makes a parameter anew whenever it is asked for one, and counts those that live then."""

    def __init__(self, full: Mapping[str, torch.Tensor]) -> None:
        super().__init__(full)
        self._made = list[weakref.ref[torch.Tensor]]()
        self.most = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        made = super().__getitem__(name).clone()
        self._made.append(weakref.ref(made))
        self.most = max(self.most, sum(each() is not None for each in self._made))
        return made


def test_parameters_that_are_assembled_do_not_pile_up_while_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    live = model()
    full = gather_full(live, SHAPE)
    assert full is not None
    monkeypatch.setattr(bulk_copy, "_AT_ONCE", 1)
    loader, assembled = FullParameterLoader(live, SHAPE), Assembled(full)
    loader.load(assembled)
    assert assembled.most == 1


def test_what_a_rank_holds_is_what_it_has_now_also_when_asked_again() -> None:
    live = model()
    first = {box: part.clone() for box, part in held_boxes(live, SHAPE).items()}
    with torch.no_grad():
        for parameter in live.parameters():
            parameter.data = parameter + 1  # elsewhere in memory, as buffers of gradients and optimizers move it
    again = held_boxes(live, SHAPE)
    assert again.keys() == first.keys()
    assert all(torch.equal(part, first[box] + 1) for box, part in again.items())
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    merged = {name: torch.zeros(SHAPE.hidden, SHAPE.ffn)}
    instead = {box.name: part for box, part in held_boxes(live, SHAPE, merged).items()}
    assert instead[name].data_ptr() == merged[name].data_ptr()
    assert not any(part.requires_grad for part in again.values())
    with pytest.raises(ValueError, match=r"not in its table: .*k_layernorm"):
        held_boxes(live, replace(SHAPE, qk_norm=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_specs_describe_the_snapshot(dtype: torch.dtype) -> None:
    snapshot = gather_full(build_model(SHAPE, device=CPU, dtype=dtype, seed=1), SHAPE)
    assert snapshot is not None
    assert specs_of(snapshot) == tuple(specs(SHAPE, dtype))


@pytest.mark.parametrize("split", list(Split))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_slices_join_to_the_whole(split: Split, ranks: int) -> None:
    vocabulary = split is Split.VOCABULARY
    full = torch.arange(19 * 8 if vocabulary else 16 * 8).view(-1, 8)
    slices = [slice_for(full, split, rank, ranks) for rank in range(ranks)]
    assert len({part.shape for part in slices}) == 1
    for rank, part in enumerate(slices):
        place = torch.full_like(part, -1)
        for into, view in copies_for(place, full, split, rank, ranks):
            assert view.untyped_storage().data_ptr() == full.untyped_storage().data_ptr(), "nothing is made for the copy"
            into.copy_(view)
        assert torch.equal(place, part)
    assert torch.equal(join(slices, split, tuple(full.shape)), full)


def test_the_stand_ins_never_hide_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.cuda.current_device
    with pytest.raises(RuntimeError, match="sees a GPU"):
        host.stand_in_for_cuda()
    assert torch.cuda.current_device is before
    with host.on_host(), pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")  # redirected nowhere: torch itself refuses


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_on_host_reaches_no_further_than_its_block() -> None:
    with host.on_host():
        assert torch.zeros(1, device="cuda").device == CPU
        assert torch.empty(2, pin_memory=True).to("cuda").cuda().device == CPU
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_devices_are_chosen_or_refused() -> None:
    assert parallel.resolve_device("auto") == parallel.resolve_device("cpu") == CPU
    assert parallel.resolve_dtype(CPU) is torch.float32
    with pytest.raises(ConfigError, match="no GPU"):
        parallel.resolve_device("cuda")


def test_a_cpu_beside_a_visible_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        parallel.resolve_device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_transformer_engine_layers_are_refused_where_they_cannot_run() -> None:
    with pytest.raises(ConfigError, match="extra `gpu`"):
        build_model(SHAPE, device=CPU, dtype=torch.float32, seed=0, layer_spec="transformer_engine")


def test_initialising_again_must_agree() -> None:
    parallel.initialize(device=CPU)
    with pytest.raises(ConfigError, match="cannot be divided"):
        parallel.initialize(device=CPU, tensor=2)
    assert parallel_state.get_tensor_model_parallel_world_size() == 1
