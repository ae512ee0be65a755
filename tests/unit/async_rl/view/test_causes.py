"""What the page says about a run: warnings by cause, where the time went, fates of tokens, and who may ask."""

from __future__ import annotations

import hashlib

import pytest

from async_rl.view import server
from async_rl.view.causes import RunMeans, metric_warnings, run_means, slowest_part, token_fates
from async_rl.view.guard import is_own_host
from async_rl.view.metric_columns import MetricColumns


def test_counters_above_zero_are_warnings():
    found = metric_warnings({"checkpoint/failed": 2, "optim/skipped": 0, "rollout/failures/reward": 7})
    assert [(each.times, each.page) for each in found] == [(2, "learner"), (7, "rollouts")]
    assert found[1].cause.endswith("reward")


def test_the_largest_idle_cause_is_named():
    assert "groups" in slowest_part({"idle/no_groups": 0.6, "idle/pushing": 0.1})
    assert "trained 95%" in slowest_part({"idle/no_groups": 0.05})
    assert slowest_part({}) == ""


def test_fates_of_tokens_add_up_and_nothing_is_in_flight_after_the_end():
    latest = {"tokens/trained": 60, "tokens/in_flight": 25, "tokens/dropped/stale": 15, "tokens/generated": 100}
    expected = [("trained", 0.6), ("in flight", 0.25), ("dropped: stale", 0.15)]
    assert token_fates(latest, is_running=True) == expected
    ended = token_fates(latest, is_running=False)
    assert [share for _, share in ended] == [0.6, 0.25, 0.15]
    assert ended[1][0].startswith("left over at the end")
    assert token_fates({"tokens/trained": 60, "tokens/in_flight": 0}, is_running=False) == [("trained", 1.0)]
    assert token_fates({"tokens/trained": 0}, is_running=True) == []


def test_means_of_a_run_are_those_of_its_time():
    columns = MetricColumns()
    for step in range(1, 41):
        is_slow = step % 2 == 0
        seconds = 3.0 if is_slow else 1.0
        columns.add(
            {"step": step, "reward/mean": float(step > 20), "idle/learner": 0.8 if is_slow else 0.0, "time/step": 0.5}
            | {"time/wait_data": seconds - 0.5, "progress/tokens": 100.0 * step, "progress/wall_s": 2.0 * step}
        )
    columns.add({"step": 40, "tokens/trained": 5.0})
    found = run_means(columns)
    assert (found.reward, found.tok_s, found.idle) == (1.0, 50.0, pytest.approx(0.6))
    assert run_means(MetricColumns()) == RunMeans(reward=None, tok_s=None, idle=None)


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
