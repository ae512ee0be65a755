"""A run listens on what docs/security.md says, its files are its user's alone, and strangers at its ports change nothing."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import Config
from async_rl.config.loading import to_yaml
from async_rl.telemetry import read_rows
from tests.scenarios.training import train_stage
from tests.scenarios.whole_runs.listeners import Listener, family, listeners_below, role_of, usage
from tests.scenarios.whole_runs.port_fuzzer import PortFuzzer
from tests.support.private_fleet import free_port
from tests.support.repository import ROOT
from tests.support.run_processes import Program, program, read_config, write_config
from tests.support.view_client import Viewed, view_of
from tests.support.waiting import until

PAGE = ROOT / "docs" / "security.md"
FRAMES = 40
"""At each listener in the short test."""
SERVE = {"redis", "learner", "rollout_workers", "rollout_workers.remote", "rollout_workers.reward_model", "buffer.view"}
"""Processes that always listen."""
ROLES = SERVE | {"rollout_workers.evaluation"}


def listed() -> set[tuple[str, str, str]]:
    """Process, kind and address of every row of the page's table."""
    text = PAGE.read_text().partition("## What listens")[2].partition("\n| setting |")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in text.splitlines() if line.startswith("| ")]
    return {(process, kind, address) for processes, kind, address in rows[1:] for process in processes.split(", ")}


def as_listed(listener: Listener) -> tuple[str, str, str]:
    if listener.kind == "tcp":
        is_everywhere = listener.address in ("0.0.0.0", "::")
        return listener.role, "tcp", "*" if is_everywhere else "127.0.0.1" if listener.address == "::1" else listener.address
    if listener.address.startswith("@"):
        return listener.role, "unix", "abstract"
    if not has_a_name(listener):
        return listener.role, "unix", "none"
    mode = Path(listener.address).parent.stat().st_mode & 0o777
    return listener.role, "unix", f"folder of mode {mode:04o}"


def has_a_name(listener: Listener) -> bool:
    """A socket whose file is gone keeps the path that it was bound to; nobody reaches it."""
    return listener.kind == "tcp" or listener.address.startswith("@") or Path(listener.address).is_socket()


@dataclass(frozen=True, kw_only=True)
class Deployment:
    config: Config
    run: Program
    servers: tuple[Program, ...]
    """`env serve` and `reward serve`."""
    view: Viewed
    """The page that the run serves."""

    @property
    def programs(self) -> tuple[Program, ...]:
        return (self.run, *self.servers)

    @property
    def family(self) -> list[int]:
        return [pid for each in self.programs for pid in family(each.pid)]

    @property
    def listeners(self) -> set[Listener]:
        return set[Listener]().union(*(listeners_below(each.pid) for each in self.programs))

    @property
    def output(self) -> str:
        return "\n".join(each.output for each in self.programs)

    def has_ended(self) -> bool:
        return any(each.has_ended() for each in self.programs)


@contextmanager
def deployment(folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int, *, warm: bool) -> Iterator[Deployment]:
    """A run with two ranks, Prometheus and an evaluator, once it has a checkpoint, beside `env serve` and `reward serve`.
    Afterwards nothing of them is in the temporary folder, where torch keeps a cache for all of its user's programs.
    """
    with tempfile.TemporaryDirectory(prefix="arl") as temporary:  # pytest's own has too long a path for a socket
        monkeypatch.setenv("TMPDIR", temporary)
        path = write_config(
            folder,
            "guarded",
            tasks={"pace_s": 1.0},  # few steps, which leaves cores to other tests
            leases={"learner_s": 60, "member_s": 60},  # the page shows who stands still for a moment as well
            learner={"steps": steps, "checkpoint_every": 4, "parallel": {"processes": 2}},
            metrics={"console": False, "prometheus_port": free_port()},
            evaluation={"every": 4, "tasks": 2, "samples": 1},
        )
        config = read_config(path)
        with ExitStack() as started:
            running = started.enter_context(program(folder, "run", "--view", "@", path, warm=warm))
            servers = (
                started.enter_context(program(folder, "env", "serve", "counting", warm=warm)),
                started.enter_context(
                    program(folder, "reward", "serve", "@", trained_reward_model(folder), "--port", free_port(), warm=warm)
                ),
            )
            view = view_of(running)
            for server in servers:
                server.until_says("is served")
            until(lambda: list(config.run_folder.glob("checkpoints/step-*")), "a checkpoint is there", while_alive=running)
            yield Deployment(config=config, run=running, servers=servers, view=view)
            for each in (running, *servers):
                each.signal(signal.SIGINT)
            for each in (running, *servers):
                assert each.exit_code() == 0, each.output
        assert {path.name for path in Path(temporary).iterdir() if not path.name.startswith("torch")} == set()


def trained_reward_model(folder: Path) -> Path:
    """The configuration of a reward model that was trained for a step."""
    run = {"name": "scores", "folder": str(folder / "runs")}
    config = train_stage.config("rm", run=run, learner={"steps": 1})
    train_stage.run(config, config.run_folder)
    path = folder / "scores.yaml"
    path.write_text(to_yaml(config))
    return path


@pytest.mark.timeout(900)
def test_a_run_and_servers_listen_where_the_page_says_and_strangers_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = os.umask(0o022)
    try:
        with deployment(tmp_path, monkeypatch, steps=100_000, warm=True) as started:
            config, found = started.config, started.listeners
            assert {role_of(pid) for pid in started.family} >= ROLES
            assert {listener.role for listener in found} >= SERVE
            assert {as_listed(listener) for listener in found} <= listed()
            assert open_to_others(config.run_folder) == set()
            the_view_sees_it_live(started)
            attack(started, found, FRAMES)
    finally:
        os.umask(before)


def open_to_others(folder: Path) -> set[Path]:
    """What is in a folder whose files come and go, and the folder itself."""
    found: set[Path] = set()
    for inside, _, names in os.walk(folder):
        for path in (Path(inside), *(Path(inside, name) for name in names)):
            with suppress(FileNotFoundError):
                if path.lstat().st_mode & 0o077:
                    found.add(path)
    return found


def the_view_sees_it_live(started: Deployment) -> None:
    """Its processes, what Redis knows, and steps as they end."""

    def shown() -> dict[str, Any] | None:
        """With what Redis knows: the page waits for it for two seconds, and asks again."""
        seen = started.view.json("/api/run?names=reward/mean")
        return seen if seen["live"] is not None else None

    seen = until(shown, "the page has an answer of Redis", while_alive=started.run)
    assert seen["is_running"], seen["sentence"]
    living = {each["name"] for each in seen["processes"] if each["is_alive"]}
    assert living == {"buffer", "learner", "worker-0", "evaluator", "view"}
    assert seen["live"]["learner"]
    assert [worker["host"] for worker in seen["live"]["workers"]] == [socket.gethostname()]
    position = f"since={seen['series']['rows']}&server={seen['series']['server']}"

    def newer() -> bool:
        """Of what is sent, the last step: rows since the position may belong to the step that was known."""
        steps = started.view.json(f"/api/run?names=reward/mean&{position}")["series"]["steps"]
        return bool(steps) and steps[-1] > seen["step"]

    until(newer, "the page has a newer step", while_alive=started.run)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_frames_at_every_port_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with deployment(tmp_path, monkeypatch, steps=1_000_000, warm=False) as started:
        attack(started, started.listeners, 10_000)


def attack(started: Deployment, found: set[Listener], frames: int) -> None:
    """Everything goes on in the same processes, and gives back what it opened."""
    seed = int(os.environ.get("FUZZ_SEED", int.from_bytes(os.urandom(4))))
    reached = {listener for listener in found if has_a_name(listener)}
    print(f"FUZZ_SEED={seed}: {frames} frames at each of {len(reached)} listeners")
    processes = {pid: usage(pid) for pid in started.family}
    fuzzer = PortFuzzer(seed)
    fuzzer.send(reached, frames, is_alive=lambda: not started.has_ended())
    fuzzer.close()
    assert not started.has_ended(), started.output
    step = steps_of(started.config)
    until(lambda: steps_of(started.config) > step + 3, "it trains on", while_alive=started.run)
    assert {pid for pid in processes if not Path(f"/proc/{pid}").exists()} == set(), started.output

    def kept() -> list[str]:
        return [
            f"{role_of(pid)}: {then} -> {now}"
            for pid, then in processes.items()
            if (now := usage(pid)).resident_mb > then.resident_mb + 256
            or now.descriptors > then.descriptors + 16
            or now.threads > then.threads + 8
        ]

    print("\n".join(f"{role_of(pid)}: {then} -> {usage(pid)}" for pid, then in processes.items()))
    until(lambda: not kept(), f"what was opened is given back: {kept()}", while_alive=started.run)


def steps_of(config: Config) -> int:
    rows = read_rows(config.run_folder / "metrics.jsonl")
    return max((row.step for row in rows), default=0)
