"""A whole real run: `async-rl run`, restarted whenever it ends by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.config import Config
from tests.chaos.pipeline.plan import Pipeline
from tests.chaos.pipeline.processes import of_role
from tests.support.run_processes import ASYNC_RL, read_config, write_config
from tests.support.waiting import PATIENCE_S
from tests.support.warm_programs import start

LOOK_AGAIN_S = 0.05
STALLED_S = PATIENCE_S
"""Longest time in which a fault may keep the run from training another step."""
MAX_AGE = 2
DRAIN_S = PATIENCE_S


KEYS = ("groups", "resumed_after")
"""Keys by which the journal's rows are told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """What a fault has hit, and when it counts as overcome."""

    role: str
    steps: int = 1
    """Steps that must follow before the fault counts as overcome."""
    ends_learner: bool = False
    """Whether they must be another learner's."""


class Stalled(Exception):
    """The run did not recover from a fault."""


class Stage:
    def __init__(self, folder: Path, pipeline: Pipeline, *, redis_url: str = "", seed: int = 0, warm: bool = False) -> None:
        """`warm`: processes are forks, which import nothing, and episodes take longer, which leaves cores to other tests."""
        self._folder, self.pipeline, self._warm = folder, pipeline, warm
        self.path = write_config(folder, "chaos", **_settings(pipeline, redis_url, seed, pace_s=0.3 if warm else 0.02))
        self.config = read_config(self.path)
        self.restarts = 0
        """How often the run ended by itself and was restarted."""
        self.endings: list[str] = []
        self._journal = _Tail(self.config.run_folder / "trained.jsonl")
        self._start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def output(self) -> Path:
        return self._folder / "output.txt"

    def pids(self, role: str) -> list[int]:
        return of_role(self.pid, role)

    def steps(self) -> int:
        """Number of rows of steps, over all learners."""
        return self._journal.count("groups")

    def lives(self) -> int:
        """Number of learners that ever started."""
        return self._journal.count("resumed_after")

    def kill_supervisor(self) -> None:
        self.close()
        self._start()

    def until(self, holds: Callable[[], bool], what: str, *, within_s: float = STALLED_S) -> None:
        """Wait until the condition holds; a run that ends meanwhile is restarted."""
        began = time.monotonic()
        while not holds():
            if (code := self._process.exitcode) is not None:
                self.restarts += 1
                self.endings.append(f"exit code {code}: {self._last_line()}")
                self._start()
            if time.monotonic() - began > within_s:
                raise Stalled(f"waited {within_s:g} s in vain until {what}")
            time.sleep(LOOK_AGAIN_S)  # other processes' files cannot be awaited

    def until_trained(self, more: int, what: str) -> None:
        goal = self.steps() + more
        self.until(lambda: self.steps() >= goal, what)

    def until_overcome(self, struck: Struck, lives: int, what: str) -> None:
        """Wait until a fault is overcome that was injected when `lives` learners had started."""
        if struck.ends_learner:  # steps of the dying learner do not count
            self.until(lambda: self.lives() > lives, f"a learner begins after {what}")
        self.until_trained(struck.steps, f"the run trains {struck.steps} steps after {what}")

    def drain(self) -> int:
        """Drain the run as Ctrl-C does; return the exit code."""
        self._process.terminate()
        self._process.join(DRAIN_S)
        if (code := self._process.exitcode) is not None:
            return code
        self.close()
        return -signal.SIGKILL

    def close(self) -> None:
        self._process.kill()
        self._process.join()

    def audit(self) -> dict[str, Any]:
        """Return the result of `async-rl audit`."""
        done = subprocess.run(
            [ASYNC_RL, "audit", "@", self.path, "--json", "--bytes"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        try:
            return {"exit_code": done.returncode, **json.loads(done.stdout)}
        except ValueError:
            return {"exit_code": done.returncode, "clean": False, "findings": [done.stderr.strip()], "unchecked": []}

    def _start(self) -> None:
        environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"}
        self._process = start(
            [ASYNC_RL, "run", "@", self.path],
            folder=self._folder, environment=environment, output=self.output, errors=self.output, warm=self._warm,
        )  # fmt: skip

    def _last_line(self) -> str:
        lines = self.output.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "it said nothing"


class _Tail:
    """Reads a growing journal; each read returns the new rows."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self._rows: Counter[str] = Counter()

    def count(self, key: str) -> int:
        """Return the rows that have this key."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read)
                found = file.read()
            whole = found[: found.rfind(b"\n") + 1]
            self._read += len(whole)
            self._rows.update(name for name in KEYS for line in whole.splitlines() if f'"{name}"'.encode() in line)
        return self._rows[key]


def _settings(pipeline: Pipeline, redis_url: str, seed: int, *, pace_s: float) -> dict[str, Any]:
    sections: dict[str, Any] = {
        "run": {"seed": seed},
        "tasks": {"pace_s": pace_s},
        "staleness": {"max_age": MAX_AGE},
        "leases": {"ticket_s": 3, "learner_s": 3, "member_s": 3},
        "learner": {"steps": 1_000_000, "checkpoint_every": 4},
        "wire": {"operation_timeout_s": 2},
    }
    if pipeline.ranks > 1:
        sections["learner"] |= {"parallel": {"tensor": pipeline.ranks, "processes": pipeline.ranks}}
    if redis_url:
        sections["redis"] = {"url": redis_url}
    if "supervision" in Config.model_fields:  # allow as many crashes as there are kills
        sections["supervision"] = {"restarts": 1_000_000, "backoff_s": 0.05, "window_s": 5}
    return sections
