"""Fixtures for everything that needs a Redis: a private server per session, and a run of one's own in it."""

from __future__ import annotations

import gc
import itertools
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from buffer.server.embedded.programs import find_binary
from tests.support import forked_pytest
from tests.support.private_server import private_server

settings.register_profile("any machine", deadline=None)  # no test asserts a time
settings.load_profile("any machine")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script: programs would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

_THREADS = Path("/proc/self/task")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: Sequence[Any]) -> None:
    for spec in specs:
        spec.python = forked_pytest.python()


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported and collected stays, and need not be looked through


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """End the threads of gloo's groups that are no longer used: each wakes a hundred times a second.

    Models refer to their groups, and are in circles.
    """
    if _THREADS.exists() and len(list(_THREADS.iterdir())) > 100:
        gc.collect()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """The address of a Redis for this session."""
    with private_server(find_binary()) as url:
        yield url


_numbers = itertools.count()


@pytest.fixture
def run_name() -> str:
    """Runs do not meet in one server, so each test has one of its own."""
    return f"test-{next(_numbers)}"
