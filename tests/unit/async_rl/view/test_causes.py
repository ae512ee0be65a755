"""What the page says about a run: warnings by cause, where the time went, fates of tokens, and who may ask."""

from __future__ import annotations

import hashlib

import pytest

from async_rl.view import server
from async_rl.view.causes import metric_warnings, slowest_part, token_fates
from async_rl.view.guard import is_own_host


def test_counters_above_zero_are_warnings():
    found = metric_warnings({"checkpoint/failed": 2, "optim/skipped": 0, "rollout/failures/reward": 7})
    assert [(each.times, each.page) for each in found] == [(2, "learner"), (7, "rollouts")]
    assert found[1].cause.endswith("reward")


def test_the_largest_idle_cause_is_named():
    assert "groups" in slowest_part({"idle/no_groups": 0.6, "idle/pushing": 0.1})
    assert "trained 95%" in slowest_part({"idle/no_groups": 0.05})
    assert slowest_part({}) == ""


def test_fates_of_tokens_add_up():
    latest = {"tokens/trained": 60, "tokens/in_flight": 25, "tokens/dropped/stale": 15, "tokens/generated": 100}
    assert token_fates(latest) == [("trained", 0.6), ("in flight", 0.25), ("dropped: stale", 0.15)]
    assert token_fates({"tokens/trained": 0}) == []


@pytest.mark.parametrize(
    ("header", "is_own"),
    [
        ("127.0.0.1:8000", True),
        ("localhost:1", True),
        ("[::1]:8000", True),
        ("10.0.0.7", True),
        ("head:8000", True),
        ("evil.example:8000", False),
        ("127.0.0.1.evil.example", False),
        ("evil.example@127.0.0.1", True),
        ("", False),
        ("[::1", False),
    ],
)
def test_names_that_a_stranger_may_own_are_refused(header: str, is_own: bool):
    assert is_own_host(header, "head") is is_own


def test_vendored_files_are_the_released_ones():
    vendor = server.STATIC / "vendor"
    sums = dict(reversed(line.split()) for line in (vendor / "SHA256SUMS").read_text().splitlines())
    assert set(sums) == {path.name for path in vendor.iterdir()} - {"SHA256SUMS"}
    assert {name: hashlib.sha256((vendor / name).read_bytes()).hexdigest() for name in sums} == sums
