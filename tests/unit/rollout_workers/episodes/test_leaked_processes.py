"""Which child processes are ended: those that no episode can own any more."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_workers.episodes.leaked_processes import LeakedProcesses


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of a test, gone in the end whatever becomes of it."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def start(started: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    started.append(process)
    while not Path(f"/proc/{process.pid}/cmdline").read_bytes():  # for a moment it has no name yet
        os.sched_yield()
    return process


def test_a_child_is_ended_once_no_episode_can_be_as_old(started: list[subprocess.Popen[bytes]]):
    told: list[tuple[str, list[str]]] = []
    of_the_worker = start(started)
    with LeakedProcesses(longest_s=5, report=lambda environment, what, names: told.append((what, names))) as strays:
        of_an_agent = start(started)
        strays.spare_children_of(told)
        of_an_episode = start(started)
        strays.spare_children_of(told)  # an agent that is known spares nobody
        strays.sweep(10)
        of_another = start(started)
        strays.sweep(15)
        assert of_an_episode.poll() is None
        strays.sweep(16)
        assert [process.poll() is None for process in (of_an_agent, of_an_episode, of_another)] == [True, False, True]
        assert told == [("leaked processes", ["sleep 1000"])]
    assert [process.poll() is None for process in (of_the_worker, of_an_agent, of_another)] == [True, False, False]
