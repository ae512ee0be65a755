"""Every plan holds every sequence once, respects the capacity, and is close to the best."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.errors import ConfigError
from learner.best_fit import brackets
from learner.packing import plan


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


def fewest_bins(lengths: np.ndarray, capacity: int) -> int:
    """Martello and Toth's L2: no packing has fewer bins."""
    best = 0
    for small in {0, *lengths[lengths <= capacity // 2].tolist()}:
        alone = lengths[lengths > capacity - small]
        half = lengths[(lengths > capacity // 2) & (lengths <= capacity - small)]
        rest = lengths[(lengths >= small) & (lengths <= capacity // 2)]
        overflow = rest.sum() - (len(half) * capacity - half.sum())
        best = max(best, len(alone) + len(half) + max(0, -(-int(overflow) // capacity)))
    return best


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


@pytest.mark.parametrize("kind", ["lognormal", "uniform", "bimodal"])
@pytest.mark.parametrize("count", [64, 1024, 8192])
def test_bins_are_nearly_as_few_as_possible(kind: str, count: int) -> None:
    lengths = drawn(kind, count, np.random.default_rng(5))
    [bins] = plan(lengths, 32768)
    assert len(bins) <= fewest_bins(lengths, 32768) + 3


@pytest.mark.parametrize("seed", range(8))
def test_many_sequences_are_packed_whole_and_within_capacity(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(100, 100_000))
    lengths = rng.integers(1, int(rng.integers(2, capacity + 1)), int(rng.integers(5_000, 9_000)))
    [bins] = plan(lengths, capacity)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert max(int(lengths[members].sum()) for members in bins) <= capacity
    assert len(bins) <= 1.005 * fewest_bins(lengths, capacity) + 1


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
    opening, closing = brackets(np.array(rooms, np.int64), np.array(wanted, np.int64))
    assert sorted(zip(opening.tolist(), closing.tolist(), strict=True)) == sorted(one_by_one)


@pytest.mark.parametrize("num_shards", [2, 8])
def test_shards_get_alike_loads(num_shards: int) -> None:
    lengths = drawn("lognormal", 1024, np.random.default_rng(6))
    loads = [sum(lengths[index] for members in bins for index in members) for bins in plan(lengths, 32768, num_shards)]
    assert max(loads) / np.mean(loads) < 1.01


def test_what_fits_one_bin_is_still_spread_over_the_shards() -> None:
    assert plan([5, 5, 5, 5], 100, 2) == [[[0, 2]], [[1, 3]]]


def test_evening_out_never_costs_the_capacity() -> None:
    # the emptiest bin first would make 3 + 2 + 2
    assert plan([3, 3, 2, 2, 2], 6, 2) == [[[0, 1]], [[2, 3, 4]]]


def test_a_shard_may_have_to_run_an_empty_bin() -> None:
    assert plan([5], 100, 2) == [[[0]], [[]]]


def test_too_long_a_sequence_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"sequence 1 has 101 tokens.*batch\.bin_tokens \(100\)"):
        plan([3, 101, 7], 100)


def test_no_sequences_make_no_bins() -> None:
    assert plan([], 100, 2) == [[], []]
