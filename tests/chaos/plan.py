"""What a run of the harness does, from its seed alone: the mix of settings, who is killed when, who dies where.

A run is a row of rounds; each has a fresh server, settings of its own and a plan of its own. Everything here is a pure
function of (seed, round), so a round can be run again by itself. Who is hit is planned; in which state the victim is at that
moment is up to the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, Literal

KILLS_PER_ROUND = 50
WRITERS = 3

Selector = Literal["windowed_fifo", "fifo", "prioritized", "freshest", "uniform"]
SELECTORS: tuple[Selector, ...] = ("windowed_fifo", "fifo", "prioritized", "freshest", "uniform")
Act = Literal["kill", "kill_server", "pause_learner", "pause_writer", "poison", "set_back"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The settings of a round."""

    selector: Selector
    max_age: int
    groups_per_step: int
    max_uses: int
    keep_steps: int
    checkpoint_every: int
    prefetch: bool
    """Take step n + 1 while step n trains."""
    publish_every: int
    """A slow fleet: only every n-th version goes live."""
    impatient: bool
    """Now and then, take without waiting for stragglers."""
    max_attempts: int
    payload_bytes: int
    ticket_lease_s: float = 1.5
    learner_lease_s: float = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    after: int
    """So many journalled acts after the event before."""
    act: Act
    victim: str
    lasts: int = 0
    """A pause ends after so many journalled acts of others."""
    kept: float = 1.0
    """The part of its data that a server which is set back keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    seed: int
    round: int
    kills: int
    mix: Mix
    set_backs: bool = False
    """The server sometimes loses what it has confirmed. Then groups may be lost, but nothing may be trained twice."""

    @property
    def name(self) -> str:
        return f"{self.seed}/{self.round}"

    def events(self) -> Iterator[Event]:
        random = Random(f"events {self.name}")
        while True:
            yield _event(random, self.set_backs)

    def order(self, role: str, life: int, points: list[str]) -> str:
        """Where this life is to die by itself; empty for no such place. Lives go through the points in turn."""
        random = Random(f"order {self.name} {role} {life}")
        if not points or random.random() < (0.5 if life else 0.8):
            return ""
        start = Random(f"points {self.seed} {role}").randrange(len(points))
        point = points[(start + 7 * self.round + life) % len(points)]
        seldom = [name for name in points if name.partition(".")[0] in SELDOM]
        chosen = [f"{point}:{1 if point in seldom else random.choice(COUNTS)}"]
        if seldom:  # what hardly ever comes is waited for beside the rest
            chosen.append(f"{seldom[life % len(seldom)]}:1")
        return ",".join(chosen)

    def random(self, role: str, life: int) -> Random:
        """What a life throws its dice with."""
        return Random(f"life {self.name} {role} {life}")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


COUNTS = (1, 1, 1, 2, 3, 5)
SELDOM = ("refuse", "resign")
"""Scripts that run once in a round, or not at all."""


def rounds(seed: int, kills: int, *, set_backs: bool) -> list[Plan]:
    return [
        Plan(
            seed=seed,
            round=number,
            kills=min(KILLS_PER_ROUND, kills - start),
            mix=_mix(seed, number),
            set_backs=set_backs,
        )
        for number, start in enumerate(range(0, kills, KILLS_PER_ROUND))
    ]


def _mix(seed: int, number: int) -> Mix:
    random = Random(f"mix {seed}/{number}")
    return Mix(
        # Every selector comes up within five rounds, whatever the seed.
        selector=SELECTORS[(seed + number) % len(SELECTORS)],
        max_age=random.choice((1, 2, 3)),
        groups_per_step=random.choice((2, 3, 4, 6)),
        max_uses=random.choice((1, 1, 2)),
        keep_steps=random.choice((0, 0, 2)),
        checkpoint_every=random.choice((1, 2, 3)),
        prefetch=random.random() < 0.6,
        publish_every=random.choice((1, 1, 2)),
        impatient=random.random() < 0.4,
        max_attempts=random.choice((1, 2, 3)),
        payload_bytes=random.choice((1 << 10, 1 << 12, 1 << 15)),
    )


CHANCES = {
    "learner": 30,
    "writer": 30,
    "server": 22,
    "keeper": 5,
    "pause_learner": 7,
    "pause_writer": 6,
    "poison": 4,
    "set_back": 8,
}
KEPT = (0.0, 0.5, 0.9, 0.99, 0.995, 0.998, 0.999)


def _event(random: Random, set_backs: bool) -> Event:
    after = random.choice((1, 3, 10, 20, 40, 60))
    chances = {kind: chance for kind, chance in CHANCES.items() if set_backs or kind != "set_back"}
    [kind] = random.choices(tuple(chances), tuple(chances.values()))
    writer = f"writer-{random.randrange(WRITERS)}"
    match kind:
        case "server":
            return Event(after=after, act="kill_server", victim="server")
        case "pause_learner":
            return Event(after=after, act="pause_learner", victim="learner", lasts=random.choice((5, 20, 60)))
        case "pause_writer":
            return Event(after=after, act="pause_writer", victim=writer, lasts=random.choice((5, 20, 60)))
        case "poison":
            return Event(after=after, act="poison", victim="server")
        case "set_back":
            return Event(after=after, act="set_back", victim="server", kept=random.choice(KEPT))
        case _:
            return Event(after=after, act="kill", victim={"keeper": "server", "writer": writer}.get(kind, kind))
