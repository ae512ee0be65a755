"""A program dies exactly where it was told to, and nowhere else."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.durable import failpoints
from async_rl.errors import ConfigError
from tests.support.waiting import PATIENCE_S

PROGRAM = """
import os
from async_rl.durable import failpoints
failpoints.define("left", "right")
failpoints.arm_from(os.environ)
for turn in range(3):
    failpoints.failpoint("left")
    print("left", turn, flush=True)
    failpoints.failpoint("right")
"""


def run(**environ: str) -> tuple[int, list[str]]:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    return ended.returncode, ended.stdout.splitlines()


def test_nothing_happens_unless_armed():
    assert run() == (0, ["left 0", "left 1", "left 2"])


@pytest.mark.parametrize(
    ("orders", "printed"),
    [("left", 0), ("left:2", 1), ("right:2", 2), ("right:3,left:3", 2), ("left:4", 3), ("somewhere.else", 3)],
)
def test_it_dies_where_and_when_it_was_told(orders: str, printed: int):
    code, lines = run(ASYNC_RL_FAILPOINT=orders)
    assert len(lines) == printed
    assert code == (0 if orders in ("left:4", "somewhere.else") else -signal.SIGKILL)


def test_the_log_tells_what_was_passed_and_where_it_died(tmp_path: Path):
    log = tmp_path / "points.log"
    run(ASYNC_RL_FAILPOINT="right:2", ASYNC_RL_FAILPOINT_LOG=str(log))
    run(ASYNC_RL_FAILPOINT_LOG=str(log))
    rows = [line.split()[:2] for line in log.read_text().splitlines()]
    assert rows == [
        ["passed", "left"],
        ["passed", "right"],
        ["died", "right"],
        ["passed", "left"],
        ["passed", "right"],
    ]


@pytest.mark.parametrize("orders", ["left:", "left:0", "left:x", "left 3"])
def test_an_order_that_cannot_be_read_is_one_sentence(orders: str):
    with pytest.raises(ConfigError, match="ASYNC_RL_FAILPOINT"):
        failpoints.arm(orders)


def test_a_point_that_nobody_defined_is_noticed_while_armed():
    failpoints.arm("anything")
    try:
        with pytest.raises(LookupError, match="never defined"):
            failpoints.failpoint("no.such.point")
    finally:
        failpoints.arm("")
    failpoints.failpoint("no.such.point")
