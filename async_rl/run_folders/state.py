"""The state of a run, decided from its lock, its ended.json and the age of its last row."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from async_rl.durable.file_lock import try_lock
from async_rl.durable.whole_file import write_whole
from async_rl.errors import find_async_rl_error, meaning_of
from async_rl.telemetry.durations import ago

LOCK = "run.lock"
ENDED = "ended.json"
RECENT_S = 120.0
"""A run whose processes were started separately counts as running while its last row is younger than this."""

StateKind = Literal["running", "finished", "stopped", "failed", "lost", "empty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    kind: StateKind
    how: str
    """A sentence: how it ended, or how it is known to run."""

    @property
    def is_running(self) -> bool:
        return self.kind == "running"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a command of `async-rl run` or `train` ended, from ended.json."""

    exit_code: int
    time: float
    reason: str = ""


@contextmanager
def recorded_end(run_folder: Path) -> Generator[list[int]]:
    """Write ended.json at the end; the block appends its exit code to the list. An earlier file is removed at the start."""
    path = run_folder / ENDED
    path.unlink(missing_ok=True)
    codes, reason = list[int](), ""
    try:
        yield codes
    except BaseException as error:
        ours = find_async_rl_error(error)
        codes.append(ours.exit_code if ours is not None else 1)
        reason = str(ours) if ours is not None else type(error).__name__
        raise
    finally:
        row = {"exit_code": codes[-1] if codes else 1, "time": time.time(), "reason": reason}
        with suppress(OSError):  # a full disk is no reason to end with another exit code
            write_whole(path, json.dumps(row) + "\n")


def is_held(lock: Path) -> bool:
    """Whether a process holds the lock of a file. The lock is taken for an instant to see it."""
    if not lock.exists():
        return False
    with lock.open() as file:
        return not try_lock(file, shared=True)


def read_state(run_folder: Path, *, step: int | None, last_row: float | None, steps: int | None) -> RunStatus:
    """The state of a run. `step` and `last_row` (a Unix time) are those of its last row, `steps` the configured number."""
    return decide_state(
        is_supervised=is_held(run_folder / LOCK),
        was_supervised=(run_folder / LOCK).exists(),
        end=_read_end(run_folder / ENDED),
        step=step,
        last_row=last_row,
        steps=steps,
        now=time.time(),
    )


def decide_state(
    *,
    is_supervised: bool,
    was_supervised: bool,
    end: RunEnd | None,
    step: int | None,
    last_row: float | None,
    steps: int | None,
    now: float,
) -> RunStatus:
    if is_supervised:
        return RunStatus(kind="running", how="its supervisor runs on this machine")
    if end is not None and (last_row is None or last_row <= end.time):
        return _ended(end, step, steps)
    if last_row is not None and now - last_row < RECENT_S and (end is not None or not was_supervised):
        return RunStatus(kind="running", how="its processes were started separately")
    if step is not None and steps is not None and step >= steps:
        return RunStatus(kind="finished", how=f"trained all {steps} steps")
    if last_row is None and not was_supervised:
        return RunStatus(kind="empty", how="it was never started")
    since = "" if last_row is None else f"; its last row is {ago(last_row, now=now)} old"
    return RunStatus(kind="lost", how=f"its processes are gone and did not say why (killed, or the machine stopped){since}")


def _ended(end: RunEnd, step: int | None, steps: int | None) -> RunStatus:
    if end.exit_code == 0:
        if step is not None and steps is not None and step >= steps:
            return RunStatus(kind="finished", how=f"trained all {steps} steps")
        return RunStatus(kind="stopped", how=f"was stopped after step {0 if step is None else step}")
    kind = meaning_of(end.exit_code)
    why = f": {end.reason}" if end.reason else ""
    return RunStatus(kind="failed", how=f"ended with exit code {end.exit_code}{f' ({kind})' if kind else ''}{why}")


def _read_end(path: Path) -> RunEnd | None:
    try:
        return RunEnd(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
