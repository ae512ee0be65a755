"""The plan of a run of the harness: settings, kills and failpoints, all from the seed.

A run is a sequence of rounds, each with a fresh server, its own settings and its own plan. Everything here is a pure function
of (seed, round), so a round can be repeated by itself. Which process is hit is planned; its state at that moment depends on
the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, Literal, get_args

from async_rl.replay_protocol import Selector

KILLS_PER_ROUND = 50
WRITERS = 3

SELECTORS: tuple[Selector, ...] = get_args(Selector)
Act = Literal["kill", "kill_server", "pause_learner", "pause_writer", "poison", "set_back"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSettings:
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
    """Only every Nth version is published, as for a slow fleet."""
    impatient: bool
    """Sometimes take without waiting for stragglers."""
    max_attempts: int
    payload_bytes: int
    ticket_lease_s: float = 1.5
    learner_lease_s: float = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    after: int
    """Journalled acts between the event before and this one."""
    act: Act
    victim: str
    lasts: int = 0
    """Journalled acts of others after which a pause ends."""
    kept: float = 1.0
    """Part of its data that a server keeps when it is set back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    seed: int
    round: int
    kills: int
    settings: RoundSettings
    set_backs: bool = False
    """Whether the server sometimes loses confirmed changes. Then groups may be lost, but none may be trained twice."""

    @property
    def name(self) -> str:
        return f"{self.seed}/{self.round}"

    def events(self) -> Iterator[Event]:
        random = Random(f"events {self.name}")
        while True:
            yield _event(random, self.set_backs)

    def order(self, role: str, life: int, points: list[str]) -> str:
        """Return the failpoints at which this life dies, or "". Successive lives go through the points in turn."""
        random = Random(f"order {self.name} {role} {life}")
        if not points or random.random() < (0.5 if life else 0.8):
            return ""
        start = Random(f"points {self.seed} {role}").randrange(len(points))
        point = points[(start + 7 * self.round + life) % len(points)]
        rare = [name for name in points if name.partition(".")[0] in RARE]
        chosen = [f"{point}:{1 if point in rare else random.choice(COUNTS)}"]
        if rare:  # a rare point is armed beside the other
            chosen.append(f"{rare[life % len(rare)]}:1")
        return ",".join(chosen)

    def random(self, role: str, life: int) -> Random:
        """Return the random numbers of a life."""
        return Random(f"life {self.name} {role} {life}")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


COUNTS = (1, 1, 1, 2, 3, 5)
RARE = ("refuse", "resign")
"""Scripts that run at most once in a round."""


def rounds(seed: int, kills: int, *, set_backs: bool) -> list[Plan]:
    return [
        Plan(
            seed=seed,
            round=number,
            kills=min(KILLS_PER_ROUND, kills - start),
            settings=_settings(seed, number),
            set_backs=set_backs,
        )
        for number, start in enumerate(range(0, kills, KILLS_PER_ROUND))
    ]


def _settings(seed: int, number: int) -> RoundSettings:
    random = Random(f"mix {seed}/{number}")
    return RoundSettings(
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
