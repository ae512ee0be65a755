"""Random histories: the buffer keeps its promises, and the memory buffer and every server reply alike."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.contracts.histories.buffer_life import BufferLife
from tests.contracts.histories.buffer_twins import BufferTwins
from tests.contracts.histories.stages import MemoryStage, ServerStage, Stage
from tests.support.private_server import private_server, servers_to_test

_runs = itertools.count()


def play(machine: type[RuleBasedStateMachine], examples: int, steps: int, seed_of_all: int | None = None) -> None:
    """Without a seed, the same sequences in every session."""
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        database=None,
        derandomize=seed_of_all is None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    if seed_of_all is not None:
        print(f"seed {seed_of_all}")
        machine = seed(seed_of_all)(machine)
    run_state_machine_as_test(machine, settings=chosen)


@pytest.fixture(scope="module")
def server_urls() -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [stack.enter_context(private_server(binary)) for binary in servers_to_test().values()]


def on_server(url: str) -> Stage:
    return ServerStage(url, f"machine-{next(_runs)}")


def life(open_stage: Callable[[], Stage]) -> type[RuleBasedStateMachine]:
    return type("Life", (BufferLife,), {"open_stage": staticmethod(open_stage)})


def twins(urls: list[str]) -> type[RuleBasedStateMachine]:
    def open_stages() -> list[Stage]:
        return [MemoryStage(), *map(on_server, urls)]

    return type("Twins", (BufferTwins,), {"open_stages": staticmethod(open_stages)})


def test_memory_and_every_server_answer_alike(server_urls: list[str]):
    play(twins(server_urls), examples=30, steps=30)


def test_the_memory_buffer_keeps_its_promises():
    play(life(MemoryStage), examples=60, steps=25)


def test_a_server_keeps_its_promises_also_when_it_is_set_back(server_urls: list[str]):
    """On one server: the twins above show that the others answer alike."""
    play(life(lambda: on_server(server_urls[0])), examples=20, steps=25)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twins_for_long(server_urls: list[str]):
    play(twins(server_urls), examples=250, steps=50, seed_of_all=random.randrange(2**32))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_lives_for_long(server_urls: list[str]):
    for url in server_urls:
        play(life(lambda url=url: on_server(url)), examples=200, steps=50, seed_of_all=random.randrange(2**32))
    play(life(MemoryStage), examples=300, steps=50, seed_of_all=random.randrange(2**32))
