"""How many groups fly, against an engine that is a formula."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_workers.limits.concurrency import FULL, STEP_UP, ConcurrencyLimit, EngineLoad


@dataclass(kw_only=True)
class Engine:
    """Room for `kv_groups` groups in its cache, and compute for `fast_groups`; more than that wait."""

    kv_groups: float = 1e9
    fast_groups: float = 1e9

    def load(self, playing: int) -> EngineLoad:
        waiting = max(0, int(playing - min(self.fast_groups, self.kv_groups)))
        return EngineLoad(kv_used=min(1.0, playing / self.kv_groups), waiting=waiting, queue_s=2.0 if waiting else 0.0)


class Flights:
    """What a worker does with its limit: in a round, every group that flies lands once."""

    def __init__(self, *, at_most: int = 1000, tickets: int = 1_000_000) -> None:
        self._concurrency = ConcurrencyLimit(at_most=at_most)
        self._tickets = tickets
        self._landed = 0

    def limits(self, engine: Engine, rounds: int) -> list[int]:
        """After each round."""
        return [self._round(engine) for _ in range(rounds)]

    def _round(self, engine: Engine) -> int:
        playing = min(self._concurrency.limit, self._tickets)
        self._landed += playing
        self._concurrency.observe(playing=playing, finished=self._landed, load=engine.load(playing))
        return self._concurrency.limit


@given(st.floats(1.5, 400))
def test_a_full_cache_is_approached_and_then_nothing_changes(kv_groups: float):
    limits = Flights().limits(Engine(kv_groups=kv_groups), 200)
    settled = limits[-1]
    assert set(limits[100:]) == {settled}
    assert settled / kv_groups <= FULL or settled == 1
    assert settled >= min(1000, 0.5 * kv_groups) - 1


@given(st.integers(1, 400))
def test_more_than_can_be_computed_is_tried_seldom_and_never_by_much(fast_groups: int):
    limits = Flights().limits(Engine(fast_groups=fast_groups), 400)[100:]
    too_many = [limit for limit in limits if limit > fast_groups]
    assert len(too_many) <= len(limits) / 6
    assert all(limit <= fast_groups + max(1, STEP_UP * fast_groups) for limit in too_many)
    assert min(limits) >= fast_groups / (1 + 2 * STEP_UP) - 1


@given(st.integers(1, 50), st.integers(1, 60))
def test_the_bounds_hold(at_most: int, fast_groups: int):
    limits = Flights(at_most=at_most).limits(Engine(fast_groups=fast_groups), 100)
    assert all(1 <= limit <= at_most for limit in limits)


def test_it_follows_a_load_that_changes():
    flights = Flights()
    before = flights.limits(Engine(kv_groups=200), 100)[-1]
    answers_grow = flights.limits(Engine(kv_groups=50), 100)[-1]
    shrink_again = flights.limits(Engine(kv_groups=200), 100)[-1]
    assert answers_grow <= 0.9 * 50 < before
    assert shrink_again >= 0.8 * before


def test_a_shortage_of_tickets_is_no_reason_for_more():
    assert set(Flights(tickets=2).limits(Engine(), 50)) == {4}


@pytest.mark.parametrize("playing", [5, 40])
def test_a_step_down_is_waited_for_before_the_next(playing: int):
    concurrency = ConcurrencyLimit(at_most=1000)
    concurrency.observe(playing=4, finished=4, load=EngineLoad(kv_used=0.95))
    once = concurrency.limit
    concurrency.observe(playing=playing, finished=5, load=EngineLoad(kv_used=0.95))
    assert concurrency.limit == once < 4
