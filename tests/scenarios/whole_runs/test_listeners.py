"""A run listens on what docs/security.md says, its files are its user's alone, and strangers at its ports change nothing."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from async_rl.config import Config
from async_rl.telemetry import read_rows
from tests.scenarios.whole_runs.listeners import Listener, family, listeners_below, role_of, usage
from tests.scenarios.whole_runs.port_fuzzer import PortFuzzer
from tests.support.repository import ROOT
from tests.support.run_processes import Program, program, read_config, until, write_config

PAGE = ROOT / "docs" / "security.md"
FRAMES = 40
"""At each listener in the short test."""


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


@contextmanager
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> Iterator[tuple[Program, Config]]:
    """With two ranks, Prometheus and an evaluator, once it has a checkpoint. Afterwards nothing of it is in the temporary
    folder, where torch keeps a cache for all of its user's programs.
    """
    with tempfile.TemporaryDirectory(prefix="arl") as temporary:  # pytest's own has too long a path for a socket
        monkeypatch.setenv("TMPDIR", temporary)
        path = write_config(
            folder,
            "guarded",
            learner={"steps": steps, "checkpoint_every": 4, "parallel": {"processes": 2}},
            metrics={"console": False, "prometheus_port": free_port()},
            evaluation={"every": 4},
        )
        config = read_config(path)
        with program(folder, "run", "@", path) as running:
            until(lambda: list(config.run_folder.glob("checkpoints/step-*")), "a checkpoint is there", while_alive=running)
            yield running, config
            running.signal(signal.SIGINT)
            running.exit_code()
        assert {path.name for path in Path(temporary).iterdir() if not path.name.startswith("torch")} == set()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_run_listens_where_the_page_says_and_strangers_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = os.umask(0o022)
    try:
        with run(tmp_path, monkeypatch, steps=100_000) as (running, config):
            roles = {role_of(pid) for pid in family(running.pid)}
            assert roles >= {"redis", "learner", "rollout_workers", "rollout_workers.evaluation"}
            found = listeners_below(running.pid)
            assert {as_listed(listener) for listener in found} <= listed()
            assert {path for path in config.run_folder.rglob("*") if path.lstat().st_mode & 0o077} == set()
            assert config.run_folder.stat().st_mode & 0o077 == 0
            attack(running, config, found, FRAMES)
    finally:
        os.umask(before)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_frames_at_every_port_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with run(tmp_path, monkeypatch, steps=1_000_000) as (running, config):
        attack(running, config, listeners_below(running.pid), 10_000)


def attack(running: Program, config: Config, found: set[Listener], frames: int) -> None:
    """Everything goes on in the same processes, and gives back what it opened."""
    seed = int(os.environ.get("FUZZ_SEED", int.from_bytes(os.urandom(4))))
    reached = {listener for listener in found if has_a_name(listener)}
    print(f"FUZZ_SEED={seed}: {frames} frames at each of {len(reached)} listeners")
    processes = {pid: usage(pid) for pid in family(running.pid)}
    fuzzer = PortFuzzer(seed)
    fuzzer.send(reached, frames, is_alive=lambda: not running.has_ended())
    fuzzer.close()
    assert not running.has_ended(), running.output
    step = steps_of(config)
    until(lambda: steps_of(config) > step + 3, "it trains on", while_alive=running)
    assert {pid for pid in processes if not Path(f"/proc/{pid}").exists()} == set(), running.output

    def kept() -> list[str]:
        return [
            f"{role_of(pid)}: {then} -> {now}"
            for pid, then in processes.items()
            if (now := usage(pid)).resident_mb > then.resident_mb + 256
            or now.descriptors > then.descriptors + 16
            or now.threads > then.threads + 8
        ]

    print("\n".join(f"{role_of(pid)}: {then} -> {usage(pid)}" for pid, then in processes.items()))
    until(lambda: not kept(), f"what was opened is given back: {kept()}", while_alive=running, within_s=60)


def steps_of(config: Config) -> int:
    rows = read_rows(config.run_folder / "metrics.jsonl")
    return max((row.step for row in rows), default=0)
