"""Every plan holds every sequence once, respects the capacity, needs few bins, and lets ranks finish together."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.models.shape import Experts, ModelShape
from learner.packing.best_fit import best_fit, fewest_bins, matched_pairs
from learner.packing.cost import Cost, cost_of
from learner.packing.lock_step import balanced_bins, fill_cheapest
from learner.packing.planner import plan

KINDS = ["lognormal", "uniform", "bimodal"]


@given(
    st.lists(st.integers(1, 100), max_size=200),
    st.integers(100, 400),
    st.integers(1, 5),
)
def test_every_plan_is_whole_and_within_capacity(lengths: list[int], capacity: int, num_shards: int) -> None:
    shards = plan(lengths, capacity, num_shards)
    assert len(shards) == num_shards
    assert len({len(bins) for bins in shards}) == 1
    assert sorted(index for bins in shards for members in bins for index in members) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in members) <= capacity for bins in shards for members in bins)
    assert plan(lengths, capacity, num_shards) == shards


@given(
    st.lists(st.integers(1, 96), min_size=1, max_size=120),
    st.sampled_from([(96, 2), (97, 8), (200, 4), (1000, 6)]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([Cost(linear=0), Cost(quadratic=0), Cost(linear=0.5, quadratic=3)]),
)
def test_room_and_bins_come_in_multiples(
    lengths: list[int], row: tuple[int, int], num_shards: int, bins_multiple: int, cost: Cost
) -> None:
    capacity, multiple = row
    shards = plan(lengths, capacity, num_shards, multiple=multiple, bins_multiple=bins_multiple, cost=cost)
    slots = [-(-length // multiple) * multiple for length in lengths]
    assert sorted(index for bins in shards for members in bins for index in members) == list(range(len(lengths)))
    assert all(sum(slots[index] for index in members) <= capacity for bins in shards for members in bins)
    [num_bins] = {len(bins) for bins in shards}
    assert num_bins % bins_multiple == 0
    # best-fit decreasing is within 11/9 of the best, and bins come in whole multiples
    at_most = 11 / 9 * plain_bound(np.array(slots), capacity) + 1
    assert num_bins * num_shards < at_most + num_shards * bins_multiple


def plain_bound(lengths: np.ndarray, capacity: int) -> int:
    """Martello and Toth's L2, as they wrote it down."""
    best = 0
    for small in {0, *lengths[lengths <= capacity // 2].tolist()}:
        alone = lengths[lengths > capacity - small]
        half = lengths[(lengths > capacity // 2) & (lengths <= capacity - small)]
        rest = lengths[(lengths >= small) & (lengths <= capacity // 2)]
        overflow = rest.sum() - (len(half) * capacity - half.sum())
        best = max(best, len(alone) + len(half) + max(0, -(-int(overflow) // capacity)))
    return best


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(30, 70))
def test_the_bound_is_that_of_martello_and_toth(lengths: list[int], capacity: int) -> None:
    falling = np.sort(np.array(lengths, np.int64))[::-1]
    assert fewest_bins(falling, capacity) == plain_bound(falling, capacity)
    assert fewest_bins(falling, capacity) <= best_fit(falling, capacity).max() + 1


def drawn(kind: str, count: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "lognormal":
        return np.clip(rng.lognormal(np.log(4000), 1, count), 1, 32768).astype(int)
    if kind == "uniform":
        return rng.integers(64, 32769, count)
    return (
        np.where(rng.random(count) < 0.75, rng.normal(700, 100, count), rng.normal(24_000, 3000, count))
        .clip(1, 32768)
        .astype(int)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [64, 1024, 8192])
def test_bins_are_nearly_as_few_as_possible(kind: str, count: int) -> None:
    lengths = drawn(kind, count, np.random.default_rng(5))
    [bins] = plan(lengths, 32768)
    assert len(bins) <= fewest_bins(np.sort(lengths)[::-1], 32768) + 3


@pytest.mark.parametrize("kind", ["lognormal", "bimodal"])
def test_tens_of_thousands_need_hardly_more_bins_than_the_bound(kind: str) -> None:
    lengths = drawn(kind, 65536, np.random.default_rng(5))
    [bins] = plan(lengths, 32768)
    assert len(bins) <= fewest_bins(np.sort(lengths)[::-1], 32768) + 3


@pytest.mark.parametrize("seed", range(8))
def test_many_sequences_are_packed_whole_and_within_capacity(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(100, 100_000))
    lengths = rng.integers(1, int(rng.integers(2, capacity + 1)), int(rng.integers(5_000, 9_000)))
    [bins] = plan(lengths, capacity)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert max(int(lengths[members].sum()) for members in bins) <= capacity
    assert len(bins) <= 1.005 * fewest_bins(np.sort(lengths)[::-1], capacity) + 1


@given(st.lists(st.integers(1, 9), max_size=12), st.lists(st.integers(1, 9), max_size=12))
def test_sequences_take_the_tightest_bins_as_if_they_came_one_by_one(rooms: list[int], wanted: list[int]) -> None:
    rooms, wanted = sorted(rooms, reverse=True), sorted(wanted, reverse=True)
    left = list(range(len(rooms)))
    one_by_one: list[tuple[int, int]] = []
    for sequence, length in enumerate(wanted):
        holding = [bin_ for bin_ in left if rooms[bin_] >= length]
        if holding:
            left.remove(holding[-1])
            one_by_one.append((holding[-1], sequence))
    opening, closing = matched_pairs(np.array(rooms, np.int64), np.array(wanted, np.int64))
    assert sorted(zip(opening.tolist(), closing.tolist(), strict=True)) == sorted(one_by_one)


# -- ranks that wait for each other ----------------------------------------------------------------------------------------


def costs_of(shards: list[list[list[int]]], lengths: np.ndarray) -> np.ndarray:
    """[shards, bins]"""
    each = 24576.0 * lengths + np.square(lengths.astype(float))
    return np.array([[each[members].sum() for members in bins] for bins in shards])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [5, 11])
def test_eight_ranks_do_alike_work_and_hardly_wait_for_each_other(kind: str, seed: int) -> None:
    lengths = drawn(kind, 4096, np.random.default_rng(seed))
    shards = plan(lengths, 32768, 8)
    costs = costs_of(shards, lengths)
    assert costs.sum(axis=1).max() <= 1.001 * costs.sum(axis=1).mean()
    assert costs.max(axis=0).sum() <= 1.005 * costs.mean(axis=0).sum()
    assert max(lengths[members].sum() for bins in shards for members in bins) <= 32768
    bound = fewest_bins(np.sort(lengths)[::-1], 32768)
    assert costs.size <= -(-bound // 8) * 8 + 8


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_hundred_sequences_are_spread_well_too(kind: str) -> None:
    waiting = []
    for seed in range(8):
        lengths = drawn(kind, 256, np.random.default_rng(seed))
        costs = costs_of(plan(lengths, 32768, 8), lengths)
        waiting.append(costs.max(axis=0).sum() / costs.mean(axis=0).sum())
    assert np.median(waiting) <= 1.04


def test_tens_of_thousands_are_spread_over_many_ranks() -> None:
    lengths = drawn("lognormal", 65536, np.random.default_rng(5))
    costs = costs_of(plan(lengths, 32768, 64, bins_multiple=4), lengths)
    assert costs.shape[1] % 4 == 0
    assert costs.max(axis=0).sum() <= 1.005 * costs.mean(axis=0).sum()
    assert costs.sum(axis=1).max() <= 1.001 * costs.sum(axis=1).mean()


@pytest.mark.parametrize("num_shards", [2, 8])
def test_shards_get_alike_loads(num_shards: int) -> None:
    lengths = drawn("lognormal", 1024, np.random.default_rng(6))
    loads = [sum(lengths[index] for members in bins for index in members) for bins in plan(lengths, 32768, num_shards)]
    assert max(loads) / np.mean(loads) < 1.01


def test_a_long_sequence_is_weighed_against_more_tokens_in_short_ones() -> None:
    lengths = [8, *[1] * 16]
    by_tokens = plan(lengths, 20, 2, cost=Cost(quadratic=0))
    assert [sum(lengths[index] for members in bins for index in members) for bins in by_tokens] == [12, 12]
    by_attention = plan(lengths, 20, 2, cost=Cost(linear=0))
    assert [[0]] in by_attention


def test_what_fits_one_bin_is_still_spread_over_the_shards() -> None:
    assert plan([5, 5, 5, 5], 100, 2) == [[[0, 2]], [[1, 3]]]


def test_what_fits_one_bin_is_spread_over_as_many_bins_as_there_must_be() -> None:
    assert sorted(map(len, plan([5, 5, 5, 5], 100, 1, bins_multiple=4)[0])) == [1, 1, 1, 1]


def test_evening_out_never_costs_the_capacity() -> None:
    # the emptiest bin first would make 3 + 2 + 2
    assert plan([3, 3, 2, 2, 2], 6, 2) == [[[0, 1]], [[2, 3, 4]]]


def test_a_bin_that_is_too_full_for_one_takes_a_shorter_one_later() -> None:
    rooms, loads = np.array([2, 9]), np.array([0, 100])
    sizes = np.array([3, 2, 1])
    assert fill_cheapest(sizes, sizes, rooms, loads).tolist() == [1, 0, 1]
    assert fill_cheapest(sizes, sizes, rooms, loads, ceiling=2).tolist() == [-1, 0, -1]
    assert balanced_bins(np.array([4, 4, 4]), np.array([4, 4, 4]), 7, 2) is None


def test_a_shard_may_have_to_run_an_empty_bin() -> None:
    assert plan([5], 100, 2) == [[[0]], [[]]]


@given(
    st.lists(st.integers(1, 300), max_size=120), st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 8]), st.booleans()
)
def test_a_sequence_longer_than_the_capacity_has_a_bin_to_itself(
    lengths: list[int], num_shards: int, bins_multiple: int, multiple: int, has_costs: bool
) -> None:
    cost = Cost(linear=1, quadratic=3) if has_costs else Cost(quadratic=0)
    shards = plan(lengths, 100, num_shards, multiple=multiple, bins_multiple=bins_multiple, cost=cost)
    bins = [members for bins in shards for members in bins]
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    for members in bins:
        slots = [-(-lengths[index] // multiple) * multiple for index in members]
        assert sum(slots) <= 100 or len(slots) == 1
    [num_bins] = {len(bins) for bins in shards}
    assert num_bins % bins_multiple == 0


def test_no_sequences_make_no_bins() -> None:
    assert plan([], 100, 2) == [[], []]


# -- what a sequence costs -------------------------------------------------------------------------------------------------


SHAPE = ModelShape(
    hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab_size=100, max_positions=512, rope_theta=1e4
)


def test_a_token_costs_the_matrices_that_it_passes_and_a_pair_the_attention() -> None:
    matrices = 2 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128) + 64 * 100
    scores_and_values = 2 * 2 * 64 / 2  # both of every layer, over the half of all pairs that causal attention sees
    assert cost_of(SHAPE) == Cost(linear=matrices / scores_and_values, quadratic=1.0)


def test_a_token_visits_a_few_of_the_experts() -> None:
    experts = Experts(number=8, per_token=2, ffn=32, layers=(1,))
    dense, sparse = cost_of(SHAPE), cost_of(replace(SHAPE, experts=experts))
    assert (dense.linear - sparse.linear) * 128 == 3 * 64 * (128 - 2 * 32)
