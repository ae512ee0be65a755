"""Why a run is not faster, in sentences: what its learner waited for in the last recorded steps, and why that took so long."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean, median

from async_rl.config.tree import Config
from async_rl.recording import Event, Recording
from async_rl.recording.rows import TRAINED

STEPS = 20
"""Steps that are looked at."""
GROUPS = 40
"""Groups of which the episodes are looked at."""
MATTERS = 0.2
"""Share of the time from which a cause is named."""
BLOCKED = 0.05
"""The same for blocked workers: only blocks of some seconds are reported at all."""

GROUPS_BYTES = 8 * 2**20
"""Bytes of groups that are read at most."""
FRESH_S = 10.0
"""Seconds for which an answer is kept."""

STAGES = {
    "task": "waiting for the environment to pose the task",
    "queue": "waiting for a place in an engine: the engines are full",
    "inference": "generating: the workers' engines are the limit",
    "environment": "in the environment and its tools",
    "reward": "in grading: the reward is slow",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    sentence: str
    page: str
    """The page that shows more."""


class Slowdowns:
    """The causes as of a few seconds ago."""

    def __init__(self, recording: Recording, config: Config | None) -> None:
        self._recording, self._config = recording, config
        self._looked_at, self._since = -FRESH_S, 0.0
        self.causes: list[Slowdown] = []

    def refresh(self) -> None:
        if time.monotonic() - self._looked_at >= FRESH_S:
            steps = latest_steps(self._recording, self._since)
            self._since = steps[0].at if steps else self._since
            self.causes = slowdowns(self._recording, self._config, steps)
            self._looked_at = time.monotonic()


def latest_steps(recording: Recording, since: float = 0.0) -> Sequence[Event]:
    """Return the last steps that were recorded, oldest first; `since`: files that were complete by then are not read."""
    return deque(recording.events(since=since, kinds=("step",)), maxlen=STEPS)


def slowdowns(recording: Recording, config: Config | None, steps: Sequence[Event]) -> list[Slowdown]:
    """Return the causes, the gravest first; one sentence that says so where there is none. Empty before the first step."""
    if not steps:
        return []
    began, ended = steps[0].at - steps[0].fields["wait_s"], steps[-1].at + steps[-1].seconds
    lately = list(recording.events(since=began, until=ended, kinds=("push", "swap", "engine", "blocked")))
    by_kind = {kind: [event for event in lately if event.kind == kind] for kind in ("push", "swap", "engine", "blocked")}
    seconds, idle = max(ended - began, 1e-3), _idle(steps)
    step_s = fmean(step.seconds for step in steps)
    found, blocked_s = _blocked(by_kind["blocked"], seconds), sum(report.seconds for report in by_kind["blocked"])
    if (slow := _slow_weights(by_kind["push"], by_kind["swap"], idle, seconds, step_s)) is not None:
        found.append(slow)
    elif idle["no_groups"] >= MATTERS and blocked_s / seconds < idle["no_groups"] / 2:  # else the stages say nothing
        found.append(_slow_rollouts(recording, idle["no_groups"], by_kind["engine"], config))
    if idle["checkpoint"] >= MATTERS:
        found.append(
            Slowdown(sentence=f"The learner waits for checkpoints {idle['checkpoint']:.0%} of its time.", page="learner")
        )
    if not found:
        busy = max(0.0, 1 - sum(idle.values()))
        found.append(Slowdown(sentence=f"The learner trains {busy:.0%} of its time: nothing holds it up.", page="learner"))
    return found


def _idle(steps: Sequence[Event]) -> Mapping[str, float]:
    """Return the share of the learner's time by cause."""
    shares: dict[str, float] = {"no_groups": 0.0, "pushing": 0.0, "checkpoint": 0.0}
    lasted = [step.fields["wait_s"] + step.seconds for step in steps]
    for step, seconds in zip(steps, lasted, strict=True):
        for metric, share in step.fields.get("idle", {}).items():
            cause = metric.removeprefix("idle/")
            shares[cause] = shares.get(cause, 0.0) + share * seconds / max(sum(lasted), 1e-9)
    return shares


def _blocked(blocked: Sequence[Event], seconds: float) -> list[Slowdown]:
    """`blocked`: reports of blocked event loops."""
    places: defaultdict[tuple[str, str], float] = defaultdict(float)
    for report in blocked:
        places[report.fields["environment"], report.fields["place"]] += report.seconds
    return [
        Slowdown(
            sentence=f"{f'The environment {environment}' if environment else 'Some code'} blocks its worker at {place}: "
            f"{total:.0f} s of the last {seconds:.0f} s. Meanwhile nothing else in that worker goes on, neither its other "
            "episodes nor its commits: await, or use in_process.",
            page="fleet",
        )
        for (environment, place), total in sorted(places.items(), key=lambda each: -each[1])
        if total / seconds >= BLOCKED
    ]


def _slow_weights(
    pushes: Sequence[Event], swaps: Sequence[Event], idle: Mapping[str, float], seconds: float, step_s: float
) -> Slowdown | None:
    """Weights that come late keep the workers from rolling out for the next version, and so the learner from training."""
    push_s = median(push.seconds for push in pushes) if pushes else 0.0
    swap_s = median(swap.seconds for swap in swaps) if swaps else 0.0
    waits = idle["pushing"] + idle["no_groups"]
    arrival_s = max(push_s, swap_s)  # the next push waits for an engine that loads
    is_slow = len(pushes) * arrival_s / seconds >= 0.5 and arrival_s > step_s
    if not (idle["pushing"] >= MATTERS or (is_slow and waits >= MATTERS)):
        return None
    return Slowdown(
        sentence=f"Weights are slow to arrive: a push takes {push_s:.1f} s, and an engine {swap_s:.1f} s to load them; a step "
        f"is trained in {step_s:.1f} s. The learner waits {waits:.0%} of its time for weights to become live, and for groups "
        "that wait for them.",
        page="fleet",
    )


def _slow_rollouts(recording: Recording, share: float, loads: Sequence[Event], config: Config | None) -> Slowdown:
    waits = f"The learner waits for rollouts {share:.0%} of its time."
    spent, episodes, environments = _stages(recording)
    if not spent:
        return Slowdown(sentence=f"{waits} What episodes do meanwhile is not recorded.", page="rollouts")
    stage, total = max(spent, key=lambda name: spent[name]), sum(spent.values())
    whose = f" of {environments.pop()}" if len(environments) == 1 else ""
    sentence = (
        f"{waits} Episodes{whose} spend {spent[stage] / max(total, 1e-9):.0%} of their time {STAGES.get(stage, stage)} "
        f"({spent[stage] / episodes:.1f} s of {total / episodes:.1f} s)."
    )
    if loads:
        limit = config.worker.groups_in_flight if config is not None else "auto"
        allowed = f"; worker.groups_in_flight allows {limit}" if isinstance(limit, int) else ""
        sentence += f" A worker plays {fmean(load.fields['inflight'] for load in loads):.1f} groups at a time{allowed}."
    return Slowdown(sentence=sentence, page="rollouts")


def _stages(recording: Recording) -> tuple[Mapping[str, float], int, set[str]]:
    """Return the seconds that the latest episodes spent by stage, how many episodes these were, and their environments."""
    spent: defaultdict[str, float] = defaultdict(float)
    environments: set[str] = set()
    episodes = read_bytes = 0
    trained = (row for row in reversed(recording.groups()) if row.fate == TRAINED)
    for row in islice(trained, GROUPS):
        if (read_bytes := read_bytes + row.length) > GROUPS_BYTES and spent:
            break
        group = recording.group(row.id)
        if group is None or group.content.times is None:
            continue
        episodes += len(group.content.rollouts)
        environments.add(group.task.environment)
        for span in group.content.times.spans:
            spent[span.stage] += (span.stop_s - span.start_s) * (1 if span.sibling >= 0 else len(group.content.rollouts))
    return spent, max(episodes, 1), environments
