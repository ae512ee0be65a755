"""`kill -9` of the learner, repeatedly: it ends bitwise equal to a learner that was not disturbed."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import pytest

import learner.loop  # noqa: F401  # it and what it imports say which failpoints there are
from async_rl.checkpoints.manifest import Manifest, candidates, read_manifest
from async_rl.durable.failpoints import ORDERS, known
from async_rl.replay_protocol import Audit
from buffer import open_buffer
from tests.scenarios.whole_runs.recorded_stream import play
from tests.support.run_history import check, lives, surviving
from tests.support.run_processes import Program, program, read_config, write_config
from tests.support.waiting import until

POINTS = sorted(name for name in known() if name.startswith(("learner.", "checkpoint.")))
MOST_STEPS_OF_A_LIFE = 16
"""Nobody lives longer, so that the run goes on until all kills are done."""
KILLED = -signal.SIGKILL


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.timeout(3600)
def test_a_learner_that_is_killed_ends_where_an_undisturbed_one_does(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    calm, killed = (Run(tmp_path, name, redis_server, steps=kills * MOST_STEPS_OF_A_LIFE) for name in ("calm", "killed"))
    calm.may_end()
    with calm.played(), calm.learner() as learner:
        assert learner.exit_code() == 0, learner.output
    with killed.played():
        for death in deaths(kills, random.Random(seed)):
            print(death)
            monkeypatch.setenv(ORDERS, death.order)
            before = len(lives(killed.config))
            with killed.learner() as learner:
                death.happens_to(learner, killed, before)
        monkeypatch.delenv(ORDERS)
        killed.may_end()
        with killed.learner() as learner:
            assert learner.exit_code() == 0, learner.output

    assert killed.trained() == calm.trained()
    assert killed.newest().files == calm.newest().files, "weights, moments or random states differ"
    assert killed.newest().models == calm.newest().models
    check(killed.config, steps=killed.steps)
    assert len(lives(killed.config)) == kills + 1
    books = killed.audit()
    assert books.is_clean, books.problems
    assert (books.stats.spent, dict(books.stats.dropped)) == (killed.num_groups, {})


class Run:
    """Length of the recording."""

    def __init__(self, folder: Path, name: str, redis_url: str, *, steps: int) -> None:
        self._folder, self.steps = folder, steps
        self._file = write_config(
            folder,
            name,
            redis={"url": redis_url},
            learner={"steps": steps, "checkpoint_every": 2, "deterministic": True},
            # Each life costs versions: nothing may become too old, or another group would take its place.
            staleness={"max_age": 100 * steps, "selector": "fifo"},
            # A ticket that the recording lost while it stood still would be rolled again, in another place.
            leases={"ticket_s": 600, "learner_s": 2.5},
        )
        self.config = read_config(self._file)
        self._may_end = Event()

    @property
    def num_groups(self) -> int:
        return self.steps * self.config.batch.groups_per_step

    @contextmanager
    def played(self) -> Iterator[None]:
        """Beside what happens meanwhile, to its end; a failure of what happens does not wait for it. The groups of the last
        step wait for `may_end`: however late a kill comes, it finds the learner alive.
        """
        playing, last = Future[None](), self.config.batch.groups_per_step

        def record() -> None:
            try:
                asyncio.run(play(self.config, self.num_groups - last))
                self._may_end.wait()
                playing.set_result(asyncio.run(play(self.config, last)))
            except BaseException as error:
                playing.set_exception(error)

        Thread(target=record, name="recording", daemon=True).start()
        yield
        playing.result()

    def may_end(self) -> None:
        """Let the recording go on to its end."""
        self._may_end.set()

    @contextmanager
    def learner(self) -> Iterator[Program]:
        with program(self._folder, "learner", "@", self._file) as started:
            yield started

    def trained(self) -> list[list[int]]:
        """The tasks of each step behind the weights."""
        return [[group.task_index for group in step.groups] for step in surviving(lives(self.config))]

    def newest(self) -> Manifest:
        return read_manifest(candidates(self.config.run_folder / "checkpoints")[0])

    def audit(self) -> Audit:
        async def ask() -> Audit:
            async with open_buffer(self.config) as buffer:
                return await buffer.audit()

        return asyncio.run(ask())


@dataclass(frozen=True, kw_only=True)
class AtPoint:
    """The learner gets to a failpoint for the n-th time."""

    name: str
    nth: int

    @property
    def order(self) -> str:
        return f"{self.name}:{self.nth}"

    def happens_to(self, learner: Program, _run: Run, _before: int) -> None:
        assert learner.exit_code() == KILLED, learner.output


@dataclass(frozen=True, kw_only=True)
class SomeTime:
    """At any moment after it has made so many steps, which may be none."""

    steps: int
    later_s: float
    order: str = ""

    def happens_to(self, learner: Program, run: Run, before: int) -> None:
        """`before`: lives that had begun when this learner was started."""
        until(lambda: self._is_ripe(run, before), f"it makes {self.steps} steps", while_alive=learner)
        time.sleep(self.later_s)
        learner.signal(signal.SIGKILL)
        assert learner.exit_code() == KILLED, learner.output

    def _is_ripe(self, run: Run, before: int) -> bool:
        found = lives(run.config)
        return len(found) > before and len(found[-1].steps) >= self.steps


def deaths(kills: int, chance: random.Random) -> list[AtPoint | SomeTime]:
    """Half of them at failpoints, no two at the same one as long as there are others."""
    points = chance.sample(POINTS, len(POINTS))
    chosen: list[AtPoint | SomeTime] = []
    for number in range(kills):
        if number % 2:
            chosen.append(SomeTime(steps=chance.randint(0, 4), later_s=0.1 * chance.random()))
        else:
            name = points[number // 2 % len(points)]
            chosen.append(AtPoint(name=name, nth=chance.randint(1, 40 if name == "checkpoint.writing" else 3)))
    return chosen
