"""One round: start a run, inject faults, drain it and audit it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.pipeline.faults import Scene, strike
from tests.chaos.pipeline.plan import Plan
from tests.chaos.pipeline.servers import OutsideServer, proxied
from tests.chaos.pipeline.stage import Stage, Stalled
from tests.support.private_server import private_folder

HOPELESS = 3
"""Stalls after which a run is given up."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    plan: Plan
    struck: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    recovery_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    problems: list[str] = field(default_factory=list[str])
    endings: list[str] = field(default_factory=list[str])
    """How the run ended by itself; it was restarted."""
    audit: dict[str, Any] = field(default_factory=dict[str, Any])
    steps: int = 0
    seconds: float = 0.0

    @property
    def is_sound(self) -> bool:
        return not self.problems and bool(self.audit.get("clean"))

    @property
    def sentence(self) -> str:
        said = "; ".join([*self.problems, *self.audit.get("findings", []), *self.audit.get("unchecked", [])])
        return (
            f"{len(self.struck)} faults in {self.seconds:.0f} s, {self.steps} steps ({self.plan.pipeline.name}): "
            f"{'clean' if self.is_sound else said}"
        )


@contextmanager
def scene_of(plan: Plan, folder: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        server = network = None
        if plan.pipeline.outside:
            server = OutsideServer(stack.enter_context(private_folder()))
            stack.callback(server.kill)
            network = stack.enter_context(proxied(server, seed=plan.seed))
        url = network.url if network is not None else ""
        stage = Stage(folder, plan.pipeline, redis_url=url, seed=plan.seed, warm=plan.warm)
        stack.callback(stage.close)
        yield Scene(stage=stage, random=plan.random(), server=server, network=network)


def play(plan: Plan, folder: Path) -> Outcome:
    outcome, began = Outcome(plan=plan), time.monotonic()
    with scene_of(plan, folder) as scene:
        stage = scene.stage
        try:
            stage.until_trained(2, "the run trains its first steps")
            for number, kind in enumerate(plan.faults):
                _overcome(number, kind, scene, outcome)
                if len(outcome.problems) >= HOPELESS:
                    break
        except Stalled as stalled:
            outcome.problems.append(str(stalled))
        if (code := stage.drain()) != 0:
            outcome.problems.append(f"told to drain, the run ended with exit code {code}")
        outcome.audit, outcome.endings, outcome.steps = stage.audit(), stage.endings, stage.steps()
    outcome.seconds = time.monotonic() - began
    return outcome


def _overcome(number: int, kind: str, scene: Scene, outcome: Outcome) -> None:
    stage, since, lives = scene.stage, time.monotonic(), scene.stage.lives()
    struck = strike(kind, scene)
    try:
        stage.until_overcome(struck, lives, f"fault {number}, {kind}")
    except Stalled as stalled:
        outcome.problems.append(str(stalled))
        stage.kill_supervisor()
        return
    seconds = time.monotonic() - since
    outcome.struck.append({"kind": kind, "role": struck.role, "seconds": round(seconds, 2)})
    outcome.recovery_s.setdefault(struck.role, []).append(seconds)
    print(f"  {number:3d} {kind:<20} {seconds:6.1f} s   step {stage.steps()}", file=sys.stderr, flush=True)
