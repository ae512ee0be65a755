"""`async-rl simulate`: predict what a fleet does, from a recipe and recorded or assumed rates."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from async_rl.cli.grammar import CommandLine, aligned, read
from async_rl.cli.simulate import VERBS
from async_rl.config import Config
from async_rl.config.loading import load_with_origins
from async_rl.errors import ConfigError, boundary
from async_rl.launch.package_guard import guard
from learner.simulation.assumed import assumed, machines_of
from learner.simulation.bottlenecks import Resource, resources
from learner.simulation.calibration import calibrated
from learner.simulation.prediction import MOST_WORKERS, Machines, Prediction, predict, smallest_fleet
from learner.simulation.rates import Rates
from learner.simulation.recorded import RecordedRun, read_run


def main(words: Sequence[str]) -> None:
    guard()
    line = read(VERBS[0], words)
    recorded = read_run(Path(found)) if (found := line.text("from")) is not None else None
    config = recorded.config if recorded is not None and not line.config else load_with_origins(line.config).config
    machines = machines_of(line, config)
    rates = assumed(line, config, _scaled(recorded, config, machines))
    found = _predicted(line, config, rates, machines, recorded)
    limits = resources(config, rates, machines, found)
    print(_document(found, limits) if line.has("json") else _table(found, limits))


def _scaled(recorded: RecordedRun | None, config: Config, machines: Machines) -> Rates | None:
    if recorded is None:
        return None
    return calibrated(recorded, cores=machines.cores).scaled(recorded.config.batch, config.batch)


def _predicted(line: CommandLine, config: Config, rates: Rates, machines: Machines, recorded: RecordedRun | None) -> Prediction:
    if (wanted := line.number("search")) is None:
        own = recorded.workers if recorded is not None and not line.config else config.worker.processes
        return predict(config, rates, machines, workers=line.integer("workers", own))
    if line.has("workers"):
        raise ConfigError("--search looks for the number of workers, so it cannot be given with --workers")
    found = smallest_fleet(config, rates, machines, steps_per_hour=wanted)
    if found is None:
        most = predict(config, rates, machines, workers=MOST_WORKERS)
        raise ConfigError(
            f"--search {wanted:g}: no fleet of up to {MOST_WORKERS} workers trains so many steps an hour; "
            f"with {MOST_WORKERS} workers it would be {most.steps_per_hour:.0f}, and the learner would wait "
            f"{most.learner_idle:.0%} of the time"
        )
    return found


def _document(found: Prediction, limits: Sequence[Resource]) -> str:
    return json.dumps({**asdict(found), "steps_per_hour": found.steps_per_hour, "resources": [asdict(each) for each in limits]})


def _table(found: Prediction, limits: Sequence[Resource]) -> str:
    of_run = {
        "workers": f"{found.workers:,}",
        "a step": f"{found.step_s:.3g} s, {found.steps_per_hour:,.0f} an hour",
        "trained": f"{found.groups_per_s:,.3g} groups and {found.tokens_per_s:,.0f} sampled tokens a second",
        "age": f"{found.age:.2f} versions: {found.age_in_flight:.2f} in flight, {found.age_in_queue:.2f} in the queue",
        "pace": f"{found.pace:.2f} steps' worth of groups",
        "learner idle": f"{found.learner_idle:.0%} of the time it waits for groups",
        "engines idle": f"{found.workers_idle:.0%} of the time they have nothing to compute",
        "pushes": f"{found.push_s:.3g} s each, on their way {found.pushing:.0%} of the time",
        "buffer": f"{found.buffer_bytes / 1e6:,.3g} MB of payloads at most",
    }
    of_limits = {each.name: f"{each.used:.0%} used{_when(each)}" for each in limits}
    return f"{aligned(of_run)}\n\nwhat limits it first:\n{aligned(of_limits)}"


def _when(resource: Resource) -> str:
    if resource.used >= 1:
        return ", which is too much"
    return f", full at {resource.full_at:,} workers" if resource.full_at is not None else ""


if __name__ == "__main__":
    with boundary("async-rl simulate"):
        main(sys.argv[1:])
