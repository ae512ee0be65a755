"""On whom a push counts: not on the silent, and on those that failed only when they have something new to show."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from async_rl.protocols import Board, Member
from async_rl.transport.sending.membership import Membership
from async_rl.transport.wire.gpus import backend_among


class Listing:
    def __init__(self) -> None:
        self.member = Member(id="w", host="h", version=4, device="cpu")

    async def members(self) -> list[Member]:
        return [self.member]

    def serves(self, version: int) -> None:
        self.member = replace(self.member, version=version)


@pytest.fixture
def listing() -> Listing:
    return Listing()


@pytest.fixture
def membership(listing: Listing) -> Membership:
    return Membership(cast("Board", listing), rest_s=60)


async def test_the_silent_are_needy_again_when_they_speak(membership: Membership) -> None:
    membership.mark_silent("w")
    assert await membership.members_behind(5) == []
    membership.mark_spoke("w", failed_at=None)
    assert await membership.members_behind(5) == ["w"]
    assert membership.is_trusted("w")


async def test_the_silent_that_speak_only_of_failure_are_not(membership: Membership) -> None:
    membership.mark_silent("w")
    membership.mark_spoke("w", failed_at=5)
    assert await membership.members_behind(6) == []


async def test_who_failed_is_counted_on_when_it_asks_but_not_trusted_until_it_succeeds(membership: Membership) -> None:
    membership.mark_failed("w", 5)
    assert await membership.members_behind(6) == []
    membership.mark_started("w")
    assert await membership.members_behind(6) == ["w"]
    assert not membership.is_trusted("w")
    membership.mark_staged("w", 6)
    assert membership.is_trusted("w")
    assert await membership.members_behind(7) == ["w"]


async def test_who_does_not_reach_the_learner_pauses_after_its_first_failure(membership: Membership) -> None:
    membership.mark_failed("w", 5, is_cut_off=True)
    membership.mark_started("w")
    assert await membership.members_behind(6) == [], "the next version would wait for it in vain, too"


async def test_who_failed_is_counted_on_when_it_came_by_the_version_alone(membership: Membership, listing: Listing) -> None:
    membership.mark_failed("w", 5)
    listing.serves(5)
    assert await membership.members_behind(6) == ["w"]


async def test_who_fails_again_rests_whatever_it_says(membership: Membership, listing: Listing) -> None:
    membership.mark_failed("w", 5)
    membership.mark_started("w")
    membership.mark_failed("w", 6)
    membership.mark_started("w")
    assert await membership.members_behind(7) == []
    listing.serves(6)
    assert await membership.members_behind(7) == []


async def test_a_push_over_nccl_needs_every_gpu_of_every_worker(listing: Listing, membership: Membership) -> None:
    for gpus, backend in (((), "gloo"), (("GPU-1",), "nccl"), (("GPU-1", "GPU-2"), "nccl"), (("GPU-1", "GPU-0"), "gloo")):
        listing.member = replace(listing.member, gpus=gpus)
        await membership.members_behind(5)
        assert backend_among(["GPU-0", *membership.gpus_of(["w"])]) == backend
