"""What the page says about a run: warnings by cause, where the time went, fates of tokens, and who may ask."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from async_rl.view import server
from async_rl.view.causes import metric_warnings, slowest_part, token_fates
from async_rl.view.guard import is_own_host
from async_rl.view.log_warnings import read_warnings


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


def test_warnings_of_one_cause_are_counted_and_cut(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    lines = [
        "10:00:00 [info     ] all is well",
        "10:00:01 [warning  ] 3 episodes failed environment=a",
        "10:00:02 [\x1b[33mwarning\x1b[0m  ] 4 episodes failed environment=b",
        f"10:00:03 [error    ] {'x' * 100_000}",
    ]
    (tmp_path / "logs" / "worker-0.log").write_text("\n".join(lines))
    first, second = read_warnings(tmp_path)
    assert (first.times, first.at, first.log) == (2, "10:00:02", "worker-0")
    assert first.text.startswith("4 episodes failed")
    assert second.level == "error"
    assert len(second.text) < 1000


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
