"""Fixtures for everything that needs a Redis: a private server per session, and a run of one's own in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import settings

from buffer.server.embedded.programs import find_binary
from tests.support.private_server import private_server

settings.register_profile("any machine", deadline=None)  # no test asserts a time
settings.load_profile("any machine")


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
