"""Reads the rates of a run from its folder: metrics.jsonl for the learner, recorded rollouts for workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np

from async_rl.config import Config
from async_rl.config.loading import load_file
from async_rl.errors import ConfigError
from async_rl.recording import RecordedGroup, Recording
from async_rl.recording.rows import TRAINED
from async_rl.run_folders.folder import CONFIG, METRICS
from async_rl.telemetry.rows import MetricRow, read_rows
from learner.simulation.rates import Rates

WARM_UP = 20
"""Steps that do not count, unless they are more than a third."""
FEWEST = 10
"""Steps that are needed."""
GROUPS = 1000
"""Recorded groups that are read: the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    config: Config
    rates: Rates
    """As they were with whatever else ran on the same cores."""
    workers: int
    step_s: float
    age: float
    engine_s: float
    """Mean time from a group's ticket until its longest episode needs no engine any more."""
    steps: int
    groups: int


def read_run(folder: Path) -> RecordedRun:
    """Raises ConfigError."""
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"--from {folder}: there is no run in this folder ({CONFIG} is missing)")
    config = load_file(Config, folder / CONFIG)
    rows = [row for row in read_rows(folder / METRICS) if "time/step" in row.values and "progress/wall_s" in row.values]
    rows = rows[min(WARM_UP, len(rows) // 3) :]
    if len(rows) < FEWEST:
        raise ConfigError(f"--from {folder}: {METRICS} has too few steps to learn rates from; train at least 15")
    groups = _groups(folder, since=rows[0].time)
    if not groups:
        raise ConfigError(
            f"--from {folder}: no rollouts are recorded, from which the workers' rates are read (recording.rollouts_mb above 0)"
        )
    learner_s, varies = _learner_s(rows)
    values = [row.values for row in rows]
    pushes = [row["weights/push_s"] + row["weights/wait_s"] for row in values if "weights/push_s" in row]
    engines = _engines(groups)
    rates = Rates(
        learner_s=learner_s,
        learner_varies=varies,
        group_s=engines.group_s * config.worker.engines,
        alone_s=engines.alone_s,
        sizes=engines.sizes,
        latencies=engines.latencies,
        playing=engines.playing,
        dropped=_dropped(rows, config.batch.groups_per_step),
        push_s=fmean(pushes) if pushes else 0.0,
        push_workers=max(1, round(fmean(row.get("weights/workers", 1.0) for row in values))),
        weight_bytes=max(row.get("weights/bytes", 0.0) for row in values),
        tokens=fmean(row["episode/length"] for row in values) * config.batch.group_size,
        group_bytes=engines.group_bytes,
    )
    return RecordedRun(
        config=config,
        rates=rates,
        workers=max(1, round(fmean(row.get("rollout/workers", config.worker.processes) for row in values))),
        step_s=(values[-1]["progress/wall_s"] - values[0]["progress/wall_s"]) / (len(rows) - 1),
        age=fmean(row["staleness/mean"] for row in values),
        engine_s=engines.engine_s,
        steps=len(rows),
        groups=len(groups),
    )


# -- the learner -----------------------------------------------------------------------------------------------------------


def _learner_s(rows: Sequence[MetricRow]) -> tuple[float, float]:
    """Return the mean time of a step without its waits for groups, and the standard deviation of its logarithm."""
    busy = [
        (after.values["progress/wall_s"] - before.values["progress/wall_s"]) * (1 - after.values.get("idle/no_groups", 0.0))
        for before, after in pairwise(rows)
    ]
    return fmean(busy), min(0.5, float(np.std(np.log(np.maximum(busy, 1e-6)))))


def _dropped(rows: Sequence[MetricRow], groups_per_step: int) -> float:
    """Return the share of groups that ended without training."""
    first, last = rows[0], rows[-1]
    names = [name for name in last.values if name.startswith("buffer/dropped/")]
    dropped = sum(last.values[name] - first.values.get(name, 0.0) for name in names)
    trained = (last.step - first.step) * groups_per_step
    return dropped / max(1.0, dropped + trained)


# -- the workers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Episode:
    worker: str
    generations: tuple[tuple[float, float], ...]
    """Begins and ends, in seconds since 1970 on the worker's clock."""
    ended: float
    tokens: int

    @property
    def generating_s(self) -> float:
        return sum(stop - start for start, stop in self.generations)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engines:
    group_s: float
    alone_s: float
    sizes: tuple[float, ...]
    latencies: tuple[float, ...]
    playing: float
    engine_s: float
    group_bytes: float


def _groups(folder: Path, since: float) -> list[tuple[RecordedGroup, int]]:
    """Return the last groups that were rolled out after `since`, and the bytes of those that trained (0: of a head)."""
    recording = Recording(folder)
    rows = [row for row in recording.groups() if row.at >= since][-GROUPS:]
    found = [(recording.group(row.id), row.length if row.fate == TRAINED else 0) for row in rows]
    return [
        (group, size) for group, size in found if group is not None and group.content.times is not None and _episodes(group)
    ]


def _engines(found: Sequence[tuple[RecordedGroup, int]]) -> _Engines:
    groups = [(group, _episodes(group)) for group, _ in found]
    longest = [max(episodes, key=lambda each: each.ended) for _, episodes in groups]
    alone_s, each_s = _token_s([episode for _, episodes in groups for episode in episodes])
    tokens = fmean(episode.tokens for episode in longest)
    generating_s = [max(1e-6, episode.generating_s) for episode in longest]
    # while a group is in the engine, so many of its episodes are on the average
    beside = fmean(
        sum(episode.generating_s for episode in episodes) / most
        for (_, episodes), most in zip(groups, generating_s, strict=True)
    )
    whole_s = [_times(group) for group, _ in groups]
    playing = fmean(
        fmean(episode.ended - began for episode in episodes) / max(1e-6, seconds)
        for (_, episodes), (began, seconds) in zip(groups, whole_s, strict=True)
    )
    sizes = [size for _, size in found if size]
    return _Engines(
        group_s=each_s * tokens * beside,
        alone_s=alone_s * tokens,
        sizes=tuple(episode.tokens / tokens for episode in longest),
        latencies=tuple(max(0.0, seconds - most) for (_, seconds), most in zip(whole_s, generating_s, strict=True)),
        playing=min(1.0, max(0.05, playing)),
        engine_s=fmean(generating_s),
        group_bytes=fmean(sizes) if sizes else 0.0,
    )


def _times(group: RecordedGroup) -> tuple[float, float]:
    """Return when the ticket was reserved, and the seconds until the last episode was scored."""
    times = group.content.times
    assert times is not None
    return times.reserved_at, times.seconds


def _episodes(group: RecordedGroup) -> list[_Episode]:
    """Return the episodes that generated something."""
    times = group.content.times
    assert times is not None
    spans: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    ended: defaultdict[int, float] = defaultdict(float)
    for span in times.spans:
        ended[span.sibling] = max(ended[span.sibling], span.stop_s)
        if span.stage == "inference":
            spans[span.sibling].append((times.reserved_at + span.start_s, times.reserved_at + span.stop_s))
    counts = [rollout.num_sampled for rollout in group.rollouts]
    return [
        _Episode(group.content.worker, tuple(generations), times.reserved_at + ended[sibling], counts[sibling])
        for sibling, generations in spans.items()
        if 0 <= sibling < len(counts) and counts[sibling] > 0
    ]


def _token_s(episodes: Sequence[_Episode]) -> tuple[float, float]:
    """Fit the time of a token, a + b x the generations that run beside it, to what was recorded; neither is below 0."""
    by_worker: defaultdict[str, list[_Episode]] = defaultdict(list)
    for episode in episodes:
        by_worker[episode.worker].append(episode)
    tokens, weighted, seconds = list[float](), list[float](), list[float]()
    for own in by_worker.values():
        beside = _beside(own)
        tokens += [episode.tokens for episode in own]
        weighted += [episode.tokens * number for episode, number in zip(own, beside, strict=True)]
        seconds += [episode.generating_s for episode in own]
    columns, took = np.array([tokens, weighted]).T, np.array(seconds)
    for kept in ((0, 1), (1,), (0,)):
        fit = np.linalg.lstsq(columns[:, kept], took, rcond=None)[0]
        if (fit >= 0).all():
            found = dict(zip(kept, fit.tolist(), strict=True))
            return found.get(0, 0.0), found.get(1, 0.0)
    return 0.0, 0.0


def _beside(episodes: Iterable[_Episode]) -> list[float]:
    """Return for each episode the mean number of generations in its worker while it generated, itself included."""
    episodes = list(episodes)
    changes = sorted(
        (moment, change)
        for episode in episodes
        for start, stop in episode.generations
        for moment, change in ((start, 1), (stop, -1))
    )
    moments = np.array([moment for moment, _ in changes])
    running = np.cumsum([change for _, change in changes])
    # the integral of the running number up to each moment
    integral = np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(moments))])

    def until(moment: float) -> float:
        return float(np.interp(moment, moments, integral))

    return [
        sum(until(stop) - until(start) for start, stop in episode.generations) / max(1e-9, episode.generating_s)
        for episode in episodes
    ]
