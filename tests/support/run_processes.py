"""A whole run as a user starts it: real programs, watched through the files that they write."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import yaml

from async_rl.config import Config
from buffer.tools.open_run import open_run
from tests.support.repository import module_command
from tests.support.waiting import PATIENCE_S, until
from tests.support.warm_programs import ASYNC_RL as ASYNC_RL
from tests.support.warm_programs import start

TASKS = Path(__file__).with_name("run_tasks.py")


def write_config(
    folder: Path,
    name: str,
    *,
    environment: str = "Paced",
    tasks: Mapping[str, Any] | None = None,
    **sections: Mapping[str, Any],
) -> Path:
    """A tiny run. `tasks` are arguments of its `environment`; `sections` go over the ones here, key by key."""
    content: dict[str, Any] = {
        "run": {"name": name, "folder": str(folder / "runs")},
        "model": {"size": {"hidden": 32, "layers": 1, "heads": 2}},
        "tokenizer": {"type": "characters", "alphabet": "0123456789="},
        "environments": [{"type": f"{TASKS}:{environment}", "args": {"max_tokens": 8, **(tasks or {})}}],
        "sampling": {"max_tokens": 8},
        "staleness": {"max_age": 2},
        "batch": {"groups_per_step": 2, "group_size": 2, "bin_tokens": 256, "drop_no_signal": False},
        "leases": {"ticket_s": 3, "learner_s": 3, "member_s": 3},
        "learner": {"steps": 20, "checkpoint_every": 6, "optimizer": {"learning_rate": 1e-3}},
        "worker": {"processes": 1, "groups_in_flight": 4, "kv_cache_gb": 0.25, "drain_s": 5},
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

    def __init__(self, process: BaseProcess, output: Path) -> None:
        assert process.pid is not None
        self._process, self.pid = process, process.pid
        self._output = output

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def until_says(self, text: str) -> None:
        until(lambda: text in self.output, f"{text!r} is printed", while_alive=self)

    def signal(self, number: signal.Signals) -> None:
        assert not self.has_ended(), self.output
        os.kill(self.pid, number)

    def has_ended(self) -> bool:
        return self._process.exitcode is not None

    def exit_code(self) -> int:
        self._process.join(PATIENCE_S)
        code = self._process.exitcode
        assert code is not None, f"it does not end; it said:\n{self.output}"
        return code


@contextmanager
def program(
    folder: Path, *arguments: object, environment: Mapping[str, str] = os.environ, warm: bool = True
) -> Iterator[Program]:
    """`async-rl ARGUMENTS`, gone at the end with all that it started. Not `warm`: executed, as a shell would."""
    output = folder / f"output-{time.monotonic_ns()}.txt"
    given = {**environment, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    process = start([ASYNC_RL, *arguments], folder=folder, environment=given, output=output, errors=output, warm=warm)
    try:
        yield Program(process, output)
    finally:
        process.kill()
        process.join()


def finished(
    folder: Path,
    *arguments: object,
    environment: Mapping[str, str] = os.environ,
    warm: bool = True,
    patience_s: float = PATIENCE_S,
) -> CompletedProcess[str]:
    """Run `async-rl ARGUMENTS` in a folder to its end; as `subprocess.run`."""
    return _finished([ASYNC_RL, *arguments], folder, environment, warm=warm, patience_s=patience_s)


def stood_still(checked: CompletedProcess[str]) -> bool:
    """Whether `env check` says that code blocks, which is also what a machine does that is busy enough."""
    return "it blocks the event loop" in checked.stdout


def finished_module(
    folder: Path, module: str, *arguments: object, environment: Mapping[str, str] = os.environ
) -> CompletedProcess[str]:
    """As `finished`, of `python -m MODULE ARGUMENTS`."""
    return _finished(module_command(module, *arguments), folder, environment, warm=True)


def _finished(
    command: Sequence[object], folder: Path, environment: Mapping[str, str], *, warm: bool, patience_s: float = PATIENCE_S
) -> CompletedProcess[str]:
    output, errors = (folder / f"{name}-{time.monotonic_ns()}.txt" for name in ("output", "errors"))
    process = start(command, folder=folder, environment=environment, output=output, errors=errors, warm=warm)
    try:
        process.join(patience_s)
        said, complained = output.read_text(errors="replace"), errors.read_text(errors="replace")
        assert process.exitcode is not None, f"{command} does not end; it said:\n{said}{complained}"
        return CompletedProcess(command, process.exitcode, said, complained)
    finally:
        process.kill()
        process.join()


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


def audit(path: Path) -> dict[str, Any]:
    """Return what `async-rl buffer audit --json` prints; an embedded server that has ended is started for it."""
    return asyncio.run(_audit(read_config(path)))


async def _audit(config: Config) -> dict[str, Any]:
    async with open_run(config) as run:
        found = await run.buffer.audit()
    assert found.is_clean, found.problems
    return {"clean": found.is_clean, "stats": asdict(found.stats)}
