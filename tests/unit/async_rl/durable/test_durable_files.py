"""Files on disks that are full, fail, or take a part of what they are given: nothing is torn, nothing merges, all is said."""

from __future__ import annotations

import errno
import os
import random
import resource
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import structlog

from async_rl.durable import failpoints
from async_rl.durable.best_effort import BestEffortRows, older
from async_rl.durable.row_file import RowFile, rows_backwards, rows_of
from async_rl.durable.whole_file import write_whole
from tests.support.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


@contextmanager
def no_file_above(size: int) -> Generator[None]:
    """A real limit: the kernel takes what fits of a write, and refuses the rest with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


ROW = b"0123456789"


@pytest.mark.parametrize("room", [0, 1, len(ROW), 2 * len(ROW) + 1])
def test_a_row_that_does_not_fit_leaves_nothing(tmp_path: Path, room: int):
    path = tmp_path / "rows"
    file = RowFile(path, sync=True)
    file.append(ROW)
    whole = path.read_bytes()
    with no_file_above(len(whole) + room), pytest.raises(OSError) as refused:
        file.append(ROW * 3)
    assert refused.value.errno == errno.EFBIG
    assert path.read_bytes() == whole, "a part of the row is left"
    file.append(b"after")
    file.close()
    assert list(rows_of(path)) == [ROW, b"after"]


@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_a_disk_that_refuses_once_costs_one_row(tmp_path: Path, error: str):
    failpoints.arm(f"append.rows:2={error}")
    file = RowFile(tmp_path / "rows", sync=False)
    file.append(b"1")
    with pytest.raises(OSError, match=os.strerror(getattr(errno, error))):
        file.append(b"2")
    file.append(b"3")
    file.close()
    assert list(rows_of(tmp_path / "rows")) == [b"1", b"3"]


def test_what_a_crash_cut_is_cut_off_at_the_next_opening(tmp_path: Path):
    path = tmp_path / "rows"
    for size in (0, 5, 70_000, 200_000):  # of the row that was cut
        for whole in (b"", b"whole\n", b"x" * 100_000 + b"\n"):
            path.write_bytes(whole + b"y" * size)
            file = RowFile(path, sync=False)
            file.append(b"z")
            file.close()
            assert path.read_bytes() == whole + b"z\n"


def test_rows_survive_limits_at_random_sizes(tmp_path: Path):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    path, expected = tmp_path / "rows", list[bytes]()
    file = RowFile(path, sync=False)
    for number in range(300):
        row = str(number).encode() * chance.randint(1, 40)
        with no_file_above(path.stat().st_size + chance.randint(0, 60)), suppress(OSError):
            file.append(row)
            expected.append(row)
        if chance.random() < 0.1:
            file.close()
            file = RowFile(path, sync=False)
    file.close()
    assert list(rows_of(path)) == expected
    assert 0 < len(expected) < 300


@pytest.mark.parametrize("point", ["whole_file.writing", "whole_file.written"])
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_a_whole_file_is_replaced_or_stays(tmp_path: Path, point: str, error: str):
    write_whole(tmp_path / "facts", "old")
    failpoints.arm(f"{point}:1={error}")
    with pytest.raises(OSError):
        write_whole(tmp_path / "facts", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("facts", "old")]
    write_whole(tmp_path / "facts", "new")
    assert (tmp_path / "facts").read_text() == "new"


def test_a_whole_file_that_does_not_fit_is_not_cut(tmp_path: Path):
    write_whole(tmp_path / "facts", "old")
    with no_file_above(100), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        write_whole(tmp_path / "facts", "x" * 200)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("facts", "old")]


def test_rows_that_may_be_lost_are_dropped_counted_and_missed_once_aloud(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    rows = BestEffortRows(path, max_bytes=1000)
    with structlog.testing.capture_logs() as said:
        rows.add(b"1")
        with no_file_above(path.stat().st_size + 1):
            rows.add(b"2")
            rows.add(b"3")
        rows.add(b"4")
        rows.add(b"5")
    rows.close()
    assert (list(rows_of(path)), rows.dropped) == ([b"1", b"4", b"5"], 2)
    assert [line["log_level"] for line in said] == ["warning", "info"]
    assert f"the disk of {tmp_path} is full" in said[0]["event"]
    assert "dropped so far: 2" in said[1]["event"]


def test_rows_that_may_be_lost_never_take_more_than_their_share(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    rows = BestEffortRows(path, max_bytes=1000)
    for number in range(500):
        rows.add(str(number).encode())
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 1000
    rows.close()
    kept = [int(row) for row in (*rows_of(older(path)), *rows_of(path))]
    assert kept == list(range(kept[0], 500))
    assert len(kept) > 100
    assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.jsonl.1"]


FILLS = """
import errno, sys
from pathlib import Path
from async_rl.durable.best_effort import BestEffortRows
from async_rl.durable.row_file import RowFile, rows_of
folder = Path(sys.argv[1])
rows, best = RowFile(folder / "rows", sync=True), BestEffortRows(folder / "best", max_bytes=1 << 30)
added = 0
try:
    while True:
        rows.append(b"x" * 1000)
        added += 1
except OSError as error:
    assert error.errno == errno.ENOSPC, error
best.add(b"y" * 5000)
print(added, len(list(rows_of(folder / "rows"))), best.dropped, (folder / "rows").read_bytes().endswith(b"x\\n"))
"""


def test_a_file_system_that_is_full(tmp_path: Path):
    """A small tmpfs of our own, where this user may have one."""
    mounted = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    script = 'mount -t tmpfs -o size=64k tmpfs "$1" && exec "$2" -c "$3" "$1"'
    with suppress(FileNotFoundError):
        done = subprocess.run(
            [*mounted, script, "sh", tmp_path, sys.executable, FILLS],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        if done.returncode == 0:
            added, found, dropped, is_whole = done.stdout.splitlines()[-1].split()
            assert (found, dropped, is_whole) == (added, "1", "True")
            assert int(added) > 10
            return
        assert "Traceback" not in done.stderr, done.stderr
    pytest.skip("this user may not mount a file system")


@pytest.mark.parametrize("end", [b"", b"torn", b"x" * 200_000])
@pytest.mark.parametrize("lengths", [[], [1], [3, 70_000, 1, 65_536, 65_535, 2], [1000] * 200])
def test_rows_are_read_from_the_end_as_from_the_beginning(tmp_path: Path, lengths: list[int], end: bytes):
    path = tmp_path / "rows"
    path.write_bytes(b"".join(bytes([97 + number % 26]) * length + b"\n" for number, length in enumerate(lengths)) + end)
    assert list(rows_backwards(path)) == list(rows_of(path))[::-1]
