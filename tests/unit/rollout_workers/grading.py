"""Graders as people write them, good and bad. They run in grader processes, which import this file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from rollout_workers.episodes.rewards import Score


def same(answer: str, response: str) -> float:
    return float(answer == response)


def in_parts(answer: str, response: str) -> Score:
    return Score(reward=np.float32(0.5), parts={"format": np.int64(1)})


def with_an_alarm() -> str:
    """As math-verify does it: signals arrive on the main thread only."""
    signal.signal(signal.SIGALRM, lambda number, frame: (_ for _ in ()).throw(TimeoutError("too hard")))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        time.sleep(60)
    except TimeoutError as error:
        return f"{error} on {threading.current_thread().name}"
    return "no alarm"


def talks() -> str:
    print("to stdout, which is no answer")
    return sys.stdin.read()


def raises() -> None:
    raise LookupError("no such answer")


def exits() -> None:
    sys.exit(3)


def crashes() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def returns_an_object() -> object:
    return object()


def own_pid() -> int:
    return os.getpid()


def leaves_a_process() -> int:
    return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid


def hangs(pids: str) -> None:
    """With a child in another session, and a grandchild in another one, whose parent is gone. Tells all their ids first."""
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
    orphan = subprocess.check_output(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"], text=True)
    Path(pids).write_text(f"{os.getpid()} {child} {orphan}")
    time.sleep(1000)
