"""Why a run is not faster, in sentences: what its learner waited for in the last recorded steps, and why that took so long."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from async_rl.config.tree import Config
from async_rl.recording import Event, Recording
from async_rl.view.recorded.stages import StageTimes, blocked_s, blocks_by_worker, latest_stages

STEPS = 20
"""Steps that are looked at."""
MATTERS = 0.2
"""Share of the time from which a cause is named."""
BLOCKED = 0.05
"""The same for blocked workers: only blocks of some seconds are reported at all."""
FRESH_S = 10.0
"""Seconds for which an answer is kept."""

MORE_GROUPS = "raise worker.groups_in_flight, so that a worker plays others meanwhile"
STAGES = {
    "task": ("waiting for the environment to pose the task", f"make `task` faster, or {MORE_GROUPS}"),
    "queue": ("waiting for a place in an engine: the engines are full", "raise worker.kv_cache_gb, or add workers"),
    "inference": ("generating: the workers' engines are the limit", "add workers"),
    "environment": ("in the environment and its tools", f"make these faster, or {MORE_GROUPS}"),
    "reward": ("in grading: the reward is slow", f"make it faster, or {MORE_GROUPS}"),
}
"""Stage of an episode -> what it spends its time on, and what helps. `blocked` has sentences of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    sentence: str
    page: str
    """The page that shows more, with its query."""
    remark: str = ""
    """What it means for the chart of idle time by cause, where that alone would mislead."""


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
    found = _blocked(by_kind["blocked"], seconds)
    blocked = sum(blocked_s(began, ended, blocks) for blocks in blocks_by_worker(by_kind["blocked"]).values())
    if (slow := _slow_weights(by_kind["push"], by_kind["swap"], idle, seconds, step_s, config)) is not None:
        found.append(slow)
    elif idle["no_groups"] >= MATTERS and blocked / seconds < idle["no_groups"] / 2:  # else the stages say nothing
        found.append(_slow_rollouts(latest_stages(recording), idle["no_groups"], by_kind["engine"], config))
    if idle["checkpoint"] >= MATTERS:
        found.append(
            Slowdown(
                sentence=f"The learner waits for checkpoints {idle['checkpoint']:.0%} of its time: raise "
                "learner.checkpoint_every.",
                page="learner",
            )
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


def _blocked(reports: Sequence[Event], seconds: float) -> list[Slowdown]:
    """`reports`: of blocked event loops."""
    places: defaultdict[tuple[str, str], float] = defaultdict(float)
    for environment in {str(report.fields["environment"]) for report in reports}:
        own = [report for report in reports if report.fields["environment"] == environment]
        for blocks in blocks_by_worker(own).values():
            for block in blocks:
                places[environment, block.place] += block.stop - block.start
    return [
        Slowdown(
            sentence=f"{f'The environment {environment}' if environment else 'Some code'} blocks its worker at {place}, for at "
            f"least {total:.0f} s of the last {seconds:.0f} s. Meanwhile nothing else in that worker goes on: neither its "
            "other episodes, nor loading weights, nor its commits. Let the code await, or call it by `await "
            "in_process(...)` or `await asyncio.to_thread(...)`.",
            page="fleet",
            remark="“no groups ready” includes the time in which a worker was blocked",
        )
        for (environment, place), total in sorted(places.items(), key=lambda each: -each[1])
        if total / seconds >= BLOCKED
    ]


def _slow_weights(
    pushes: Sequence[Event],
    swaps: Sequence[Event],
    idle: Mapping[str, float],
    seconds: float,
    step_s: float,
    config: Config | None,
) -> Slowdown | None:
    """Weights that come late keep the workers from rolling out for the next version, and so the learner from training."""
    push_s = median(push.seconds for push in pushes) if pushes else 0.0
    swap_s = median(swap.seconds for swap in swaps) if swaps else 0.0
    waits = idle["pushing"] + idle["no_groups"]
    arrival_s = max(push_s, swap_s)  # the next push waits for an engine that loads
    is_slow = len(pushes) * arrival_s / seconds >= 0.5 and arrival_s > step_s
    if not (idle["pushing"] >= MATTERS or (is_slow and waits >= MATTERS)):
        return None
    every = f" (now {config.wire.push_every_steps})" if config is not None else ""
    age = f" (now {config.staleness.max_age:g})" if config is not None else ""
    remark = "“no groups ready” is here the wait for groups of workers that wait for weights: see the pushes, not the rollouts"
    return Slowdown(
        sentence=f"Weights are slow to arrive: a push takes {push_s:.1f} s until all workers have it, and an engine "
        f"{swap_s:.1f} s to load them; a step is trained in {step_s:.1f} s. The learner waits {waits:.0%} of its time for "
        "weights to become live, and for groups that wait for them. Push less often: raise "
        f"wire.push_every_steps{every} and, so that this is allowed, staleness.max_age{age}; or make pushes smaller "
        "(wire.dtype, wire.deltas).",
        page="fleet",
        remark=remark if idle["no_groups"] >= MATTERS else "",
    )


def _slow_rollouts(stages: StageTimes, share: float, loads: Sequence[Event], config: Config | None) -> Slowdown:
    waits = f"The learner waits for rollouts {share:.0%} of its time."
    page, spent = "rollouts?order=slowest", {name: seconds for name, seconds in stages.seconds.items() if name != "blocked"}
    if not spent:
        return Slowdown(sentence=f"{waits} What episodes do meanwhile is not recorded.", page=page)
    stage, total = max(spent, key=lambda name: spent[name]), sum(spent.values())
    whose = f" of {min(stages.environments)}" if len(stages.environments) == 1 else ""
    doing, remedy = STAGES.get(stage, (stage, ""))
    sentence = f"{waits} Episodes{whose} spend {spent[stage] / max(total, 1e-9):.0%} of their time {doing}."
    if loads:
        played = fmean(load.fields["inflight"] for load in loads)
        limit = config.worker.groups_in_flight if config is not None else "auto"
        allowed = f"; worker.groups_in_flight allows {limit}" if isinstance(limit, int) else ""
        sentence += f" A worker plays {played:.1f} groups at a time{allowed}."
        if stage == "inference" and isinstance(limit, int) and config is not None and _may_play_more(played, limit, config):
            remedy = "raise worker.groups_in_flight, as engines are faster with more at a time, or add workers"
    return Slowdown(sentence=f"{sentence} What helps: {remedy}." if remedy else sentence, page=page)


def _may_play_more(played: float, limit: int, config: Config) -> bool:
    """Whether its setting, and not the number of free slots, keeps a worker from playing more."""
    return played >= 0.8 * limit and limit < config.limits.max_slots
