"""The faults. After each, the other processes go on, and the affected one comes back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from signal import SIGCONT, SIGKILL, SIGTERM, SIGUSR1

from tests.wire_faults.network import Direction
from tests.wire_faults.stage import NeverHappened, Stage

WORKERS = ("w0", "w1", "w2")
STORM = 20
STORM_S = 10.0
STORM_TICK_S = 0.25
"""Workers of a storm check their weights less often, to leave time for the wire."""
_TRANSFER_S = 0.03
"""About as long as a push takes here: strikes after "begin" fall anywhere in it, and some after it."""

WORKER_MOMENTS = ("read:offer", "posted:ready", "read:begin", "transfer", "posted:staged", "read:flip", "swap")
LEARNER_MOMENTS = (
    "posted:offer",
    "read:ready",
    "posted:begin",
    "transfer",
    "read:staged",
    "staged",
    "published",
    "posted:flip",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    fault: str
    moment: str
    stall_s: float
    """The longest that any version took from its offer until it was live."""
    late_s: float
    """How much of that the learner's process waited for a turn on the machine's cores."""
    back_s: float
    """Time until the affected process serves the same version as the others."""
    problem: str = ""

    @property
    def sentence(self) -> str:
        said = self.problem if self.problem else f"stall {self.stall_s:5.2f} s, all as before after {self.back_s:5.2f} s"
        return f"{self.fault:<15} {self.moment:<14} {said}"


Trial = Callable[[Stage, random.Random], Awaitable[str]]
"""Plays one fault; returns the moment at which it struck. Raises NeverHappened."""


async def play(fault: str, stage: Stage, luck: random.Random) -> Played:
    since, began = len(stage.facts), asyncio.get_running_loop().time()
    moment, problem = "", ""
    try:
        moment = await TRIALS[fault](stage, luck)
        await stage.all_serve(stage.live_version, *WORKERS, since=since)
    except NeverHappened as error:
        problem = str(error)
    live = [fact.more for fact in stage.facts[since:] if fact.what == "live" and fact.who == "learner"]
    slowest = max(live, key=lambda more: more["seconds"] - more["late_s"], default={"seconds": 0.0, "late_s": 0.0})
    return Played(
        fault=fault,
        moment=moment,
        stall_s=slowest["seconds"],
        late_s=slowest["late_s"],
        back_s=round(asyncio.get_running_loop().time() - began, 3),
        problem=problem,
    )


async def _others_go_on(stage: Stage, *but: str, versions: int = 2) -> None:
    since, version = len(stage.facts), stage.live_version
    await stage.all_serve(version + versions, *(name for name in WORKERS if name not in but), since=since)


def _moment(luck: random.Random, moments: tuple[str, ...], begin: str) -> tuple[str, str, float]:
    """Its name, the message that it hangs on, and how long after that."""
    name = luck.choice(moments)
    return (name, begin, luck.uniform(0.001, _TRANSFER_S)) if name == "transfer" else (name, name, 0.0)


async def _kill_a_worker(stage: Stage, luck: random.Random) -> str:
    victim = luck.choice(WORKERS)
    moment, at, after_s = _moment(luck, WORKER_MOMENTS, "read:begin")
    await stage.strike(victim, "SIGKILL", at, after_s)
    is_supervisor_quick = luck.random() < 0.5
    if not is_supervisor_quick:
        await _others_go_on(stage, victim)
    await stage.ended(victim)
    await stage.start(victim, "worker")
    if is_supervisor_quick:
        await _others_go_on(stage, victim)
    await _others_go_on(stage, versions=1)
    return moment


async def _stop_a_worker(stage: Stage, luck: random.Random) -> str:
    victim = luck.choice(WORKERS)
    moment, at, after_s = _moment(luck, WORKER_MOMENTS, "read:begin")
    await stage.strike(victim, "SIGSTOP", at, after_s)
    await _others_go_on(stage, victim)
    stage.signal(victim, SIGCONT)
    await _others_go_on(stage, versions=1)
    return moment


async def _end_a_worker(stage: Stage, luck: random.Random) -> str:
    victim = luck.choice(WORKERS)
    moment, at, after_s = _moment(luck, WORKER_MOMENTS, "read:begin")
    await stage.strike(victim, "SIGTERM", at, after_s)
    await _ends_well(stage, victim)
    await _others_go_on(stage, victim)
    await stage.start(victim, "worker")
    await _others_go_on(stage, versions=1)
    return moment


async def _kill_the_learner(stage: Stage, luck: random.Random) -> str:
    moment, at, after_s = _moment(luck, LEARNER_MOMENTS, "posted:begin")
    await stage.strike("learner", "SIGKILL", at, after_s)
    await stage.ended("learner")
    await stage.resign()
    await stage.start("learner", "learner")
    await _others_go_on(stage, versions=1)
    return moment


async def _end_the_learner(stage: Stage, luck: random.Random) -> str:
    moment, at, after_s = _moment(luck, LEARNER_MOMENTS, "posted:begin")
    await stage.strike("learner", "SIGTERM", at, after_s)
    await _ends_well(stage, "learner")
    await stage.start("learner", "learner")
    await _others_go_on(stage, versions=1)
    return moment


async def _storm(stage: Stage, luck: random.Random) -> str:
    names = [f"storm{number}" for number in range(STORM)]
    since = len(stage.facts)

    async def join(name: str) -> None:
        await asyncio.sleep(luck.uniform(0, STORM_S))
        await stage.start(name, "worker", tick_s=STORM_TICK_S)

    async with asyncio.TaskGroup() as joining:
        for name in names:
            joining.create_task(join(name))
    await stage.all_serve(stage.live_version, *names, since=since)
    await _others_go_on(stage, versions=1)
    for name in names:
        stage.signal(name, SIGTERM)
    for name in names:
        await _ends_well(stage, name)
    return f"{STORM} in {STORM_S:g} s"


async def _a_stranger(stage: Stage, luck: random.Random) -> str:
    since = len(stage.facts)
    await stage.start("stranger", "worker", other_model=True)
    await asyncio.sleep(luck.uniform(0, 0.2))
    if await stage.ended("stranger") == 0:
        raise NeverHappened("the worker with another model ended as if all were well")
    await _others_go_on(stage)
    if any(fact.who == "stranger" and fact.what == "serves" and fact.more["version"] >= 0 for fact in stage.facts[since:]):
        raise NeverHappened("the worker with another model was refused: it served")
    if any("stranger" in fact.more["dropped"] for fact in stage.facts[since:] if fact.what == "live" and fact.who == "learner"):
        raise NeverHappened("the worker with another model was refused before it said hello: it was offered a version")
    return "hello"


async def _cut_one_way(stage: Stage, luck: random.Random) -> str:
    directions: tuple[Direction, ...] = ("from_learner", "to_learner")
    direction = luck.choice(directions)
    await stage.start("far", "worker", remote=True)
    since = len(stage.facts)
    await stage.all_serve(stage.live_version, "far", since=since)
    await asyncio.sleep(luck.uniform(0, 0.3))
    stage.cut("far", direction)
    await _others_go_on(stage, versions=3)
    stage.heal("far", direction)
    healed = len(stage.facts)
    await stage.all_serve(stage.live_version, "far", since=healed)
    stage.signal("far", SIGKILL)
    await stage.ended("far")
    await _others_go_on(stage, versions=1)
    return direction


async def _two_that_cannot_meet(stage: Stage, luck: random.Random) -> str:
    """Both reach the learner; there is no way between them."""
    since = len(stage.facts)
    for name in ("far", "away"):
        await stage.start(name, "worker", remote=True)
    await stage.all_serve(stage.live_version, "far", "away", since=since)
    await _others_go_on(stage)
    since = len(stage.facts)
    await stage.all_serve(stage.live_version + 3, *WORKERS, "far", "away", since=since)
    if (
        slowest := max(fact.more["seconds"] for fact in stage.facts[since:] if fact.what == "live" and fact.who == "learner")
    ) > stage.wire.operation_timeout_s:
        raise NeverHappened(f"they were sent to apart from then on: a push took {slowest:.2f} s")
    for name in ("far", "away"):
        stage.signal(name, SIGTERM)
        await _ends_well(stage, name)
    await _others_go_on(stage, versions=1)
    return "mesh"


async def _ends_well(stage: Stage, name: str) -> None:
    try:
        code = await stage.ended(name)
    except NeverHappened:
        stage.signal(name, SIGUSR1)
        await asyncio.sleep(0.5)
        raise
    if code != 0:
        raise NeverHappened(f"{name} was asked to end, and ended with code {code}")


TRIALS: Mapping[str, Trial] = {
    "worker SIGKILL": _kill_a_worker,
    "worker SIGSTOP": _stop_a_worker,
    "worker SIGTERM": _end_a_worker,
    "learner SIGKILL": _kill_the_learner,
    "learner SIGTERM": _end_the_learner,
    "storm": _storm,
    "stranger": _a_stranger,
    "one-way cut": _cut_one_way,
    "no way between": _two_that_cannot_meet,
}

CUTS = ("one-way cut", "no way between")
"""They need networks of their own."""
