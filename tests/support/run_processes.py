"""A whole run as a user starts it: real programs, watched through the files that they write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml

from async_rl.config import Config

T = TypeVar("T")

ASYNC_RL = Path(sys.executable).with_name("async-rl")
TASKS = Path(__file__).with_name("run_tasks.py")
PATIENCE_S = 150.0
"""For anything that must happen at all. Importing torch in several processes dominates, on a busy machine more so."""


def write_config(folder: Path, name: str, *, tasks: Mapping[str, Any] | None = None, **sections: Mapping[str, Any]) -> Path:
    """A tiny run. `tasks` are arguments of its environment; `sections` go over the ones here, key by key."""
    content: dict[str, Any] = {
        "run": {"name": name, "folder": str(folder / "runs")},
        "model": {"size": {"hidden": 32, "layers": 1, "heads": 2}},
        "tokenizer": {"type": "characters", "alphabet": "0123456789="},
        "environments": [{"type": f"{TASKS}:Paced", "args": {"max_tokens": 8, **(tasks or {})}}],
        "sampling": {"max_tokens": 8},
        "staleness": {"max_age": 2},
        "batch": {"groups_per_step": 2, "group_size": 2, "bin_tokens": 256, "drop_no_signal": False},
        "leases": {"ticket_s": 3, "learner_s": 3, "member_s": 3},
        "learner": {"steps": 20, "checkpoint_every": 6},
        "worker": {"processes": 1, "groups_in_flight": 4, "drain_s": 5},
        "metrics": {"console": False},
        "device": "cpu",
    }
    for section, changes in sections.items():
        content[section] = {**content.get(section, {}), **changes}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def read_config(path: Path) -> Config:
    return Config.model_validate(yaml.safe_load(path.read_text()))


class Program:
    """One `async-rl` process; what it prints is in a file."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._process = process
        self._output = output

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def until_says(self, text: str) -> None:
        until(lambda: text in self.output, f"{text!r} is printed", while_alive=self)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def exit_code(self) -> int:
        try:
            return self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end; it said:\n{self.output}") from None


@contextmanager
def program(folder: Path, *arguments: object, environment: Mapping[str, str] = os.environ) -> Iterator[Program]:
    """`async-rl ARGUMENTS`, gone at the end with all that it started."""
    output = folder / f"output-{time.monotonic_ns()}.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [ASYNC_RL, *map(str, arguments)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**environment, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
    try:
        yield Program(process, output)
    finally:
        process.kill()
        process.wait()


def until(reached: Callable[[], T | None], what: str, *, while_alive: Program | None = None, within_s: float = PATIENCE_S) -> T:
    """What `reached` returns once that is true. Other processes' files cannot be awaited, so this looks again and again."""
    deadline = time.monotonic() + within_s
    while True:
        ended = while_alive is not None and while_alive.has_ended()
        if found := reached():
            return found
        if ended or time.monotonic() > deadline:
            said = f"; it said:\n{while_alive.output}" if while_alive is not None else ""
            raise AssertionError(f"waited in vain until {what}{' (the program has ended)' if ended else ''}{said}")
        time.sleep(0.02)


def pid_of(config: Config, name: str) -> int:
    """Of a process of `async-rl run`."""
    return json.loads((config.run_folder / "processes.json").read_text())[name]


def redis_pid(config: Config) -> int:
    """Of the embedded server, which is a child of the process that keeps it."""
    keeper = pid_of(config, "buffer")
    (server,) = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    return int(server)


def restarted(config: Config, name: str, old_pid: int) -> Callable[[], bool]:
    return lambda: pid_of(config, name) != old_pid


def audit(folder: Path, path: Path) -> dict[str, Any]:
    """What `async-rl buffer audit` says; for an embedded server that has ended, with the server started again."""
    if read_config(path).redis.url:
        return _audit(path)
    with program(folder, "buffer", "serve", "@", path) as server:
        server.until_says("redis serves run")
        return _audit(path)


def _audit(path: Path) -> dict[str, Any]:
    done = subprocess.run(
        [ASYNC_RL, "buffer", "audit", "@", path, "--json"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)
