"""Pure: what must hold of a run across all crashes. Each rule returns its violations, one sentence each.

    ticket ──▶ trained by a step ──▶ in a checkpoint ──▶ spent, archived       "surviving": behind the newest whole checkpoint
       └─────▶ dropped with a reason, or in flight

What cannot be checked (an emptied Redis, a journal of an older release) is listed in `AuditVerdict.unchecked`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from async_rl.checkpoints.trained_steps import JournaledStep, TrainedSteps
from buffer.keys import ticket_number
from buffer.run_audit.evidence import CheckpointEvidence, Evidence, RedisState


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCounts:
    """How many tasks of a run are where."""

    begun: int
    trained: int
    """In surviving steps."""
    in_flight: int
    """With a ticket that has not ended: in rollout, ready, or taken for a step that is in no checkpoint yet."""
    waiting: int
    """Waiting to be rolled again."""
    untrained: int
    """Dropped for good: no signal, or failed too often."""
    lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditVerdict:
    findings: Sequence[str]
    unchecked: Sequence[str]
    surviving: Sequence[JournaledStep]
    rolled_back: int
    """Steps whose training is no longer part of the weights."""
    tasks: TaskCounts | None


def judge(evidence: Evidence) -> AuditVerdict:
    journal = evidence.journal if evidence.journal is not None else TrainedSteps(lives=(), damage=())
    newest, redis = evidence.newest, evidence.redis
    surviving = _surviving(journal, newest)
    durable = surviving if surviving is not None else []
    all_steps = [step for life in journal.lives for step in life.steps]
    findings = [
        *journal.damage,
        *_damaged(evidence),
        *_not_in_the_journal(newest, surviving),
        *_missing_steps(durable),
        *_trained_twice(durable, evidence.max_uses),
        *_too_old(journal, evidence.age_bound),
        *_versions_back(journal),
        *_fences_back(journal, evidence.checkpoints),
        *_vanished_between(journal, [each for each in evidence.checkpoints if not each.problem]),
        *_archive(evidence, all_steps),
    ]
    unchecked: list[str] = []
    tasks = None
    if redis is None:
        unchecked.append(f"Redis: {evidence.redis_unread}")
    else:
        findings += [f"Redis: {problem}" for problem in redis.problems]
        if reason := _why_not_comparable(redis, newest):
            unchecked.append(f"Redis beside the files: {reason}")
        else:
            saved = redis.number("saved", -1)
            settled = [step for step in journal.in_force() if step.number <= saved]
            tasks = _tasks(redis, settled)
            findings += [
                *_steps_gone(saved, newest),
                *_still_alive(redis, settled, evidence.max_uses),
                *_numbers_back(redis, journal, evidence.checkpoints),
                *_lost(redis, tasks, settled, journal),
                *_under_two_tickets(redis, settled),
                *_not_archived(evidence, redis, settled),
            ]
    return AuditVerdict(
        findings=findings,
        unchecked=unchecked,
        surviving=durable,
        rolled_back=len(all_steps) - len(journal.in_force()),
        tasks=tasks,
    )


# -- journal and checkpoints -----------------------------------------------------------------------------------------------
def _surviving(journal: TrainedSteps, newest: CheckpointEvidence | None) -> list[JournaledStep] | None:
    """Return the steps behind the newest undamaged checkpoint; None if the journal does not have them."""
    if newest is None or newest.position is None:
        return []
    return journal.behind(newest.timeline, newest.step)


def _damaged(evidence: Evidence) -> list[str]:
    """Report damaged checkpoints that are newer than the newest undamaged one; older ones appear in the table only."""
    newer = takewhile(lambda each: bool(each.problem), evidence.checkpoints)
    problems = [f"checkpoint {each.name} cannot be used: {each.problem}" for each in newer]
    if evidence.archive_damage:
        problems.append(f"{evidence.archive_damage} ranges of the archive cannot be read")
    return problems


def _not_in_the_journal(newest: CheckpointEvidence | None, surviving: list[JournaledStep] | None) -> list[str]:
    if newest is None or surviving is not None:
        return []
    return [f"checkpoint {newest.name} is of a learner (timeline {newest.timeline}) that the journal does not know"]


def _missing_steps(surviving: Sequence[JournaledStep]) -> list[str]:
    times = Counter(step.number for step in surviving)
    last = max(times, default=0)
    wrong = [number for number in range(1, last + 1) if times[number] != 1]
    return [f"{len(wrong)} surviving steps are missing in the journal, or listed twice: {_some(wrong)}"] if wrong else []


def _trained_twice(surviving: Sequence[JournaledStep], max_uses: int) -> list[str]:
    problems: list[str] = []
    for group, used in _uses(surviving).items():
        if len(set(used)) < len(used):
            problems.append(f"group {group} was trained twice by one step: {_some(used)}")
        elif len(used) > max_uses:
            problems.append(f"group {group} was trained by the steps {_some(used)}, and may train {max_uses}")
    return problems


def _too_old(journal: TrainedSteps, age_bound: int) -> list[str]:
    return [
        f"step {step.number} of timeline {life.timeline} trained version {step.trained} on group {group.id}, whose oldest "
        f"token is of version {group.oldest_version}: older than {age_bound} (was staleness.max_age higher then? name it here)"
        for life in journal.lives
        for step in life.steps
        for group in step.groups
        if step.trained - group.oldest_version > age_bound
    ]


def _versions_back(journal: TrainedSteps) -> list[str]:
    problems: list[str] = []
    highest = -1
    for life in journal.lives:
        if life.version <= highest:
            problems.append(f"timeline {life.timeline} began with version {life.version}, and {highest} was in use before it")
        for step in life.steps:
            if step.version < step.trained:
                problems.append(f"step {step.number} of timeline {life.timeline} made version {step.version} of {step.trained}")
        highest = max(highest, life.newest)
    return problems


def _fences_back(journal: TrainedSteps, checkpoints: Iterable[CheckpointEvidence]) -> list[str]:
    """Check that later learners have higher fences, by the journal and by the names of checkpoints."""
    written = {each.timeline: each.life for each in checkpoints if each.timeline}
    fences = [
        (life.timeline, fence)
        for life in journal.lives
        if (fence := life.fence if life.fence is not None else written.get(life.timeline)) is not None
    ]
    return [
        f"timeline {later} has fence {second}, and timeline {earlier} before it {first}: fences went back"
        for (earlier, first), (later, second) in pairwise(fences)
        if second <= first
    ]


def _vanished_between(journal: TrainedSteps, whole: Sequence[CheckpointEvidence]) -> list[str]:
    """Check that tasks begun by an older checkpoint are trained by the newer one, or still listed in it."""
    problems: list[str] = []
    for newer, older in pairwise(whole):
        before, after = older.position, newer.position
        chain, begun = journal.behind(newer.timeline, newer.step), journal.behind(older.timeline, older.step)
        if before is None or after is None or chain is None or begun is None or not newer.counts_untrained:
            continue
        if [step.version for step in begun] != [step.version for step in chain[: len(begun)]]:
            continue  # the older one is of an abandoned timeline
        known = {each.task_index for each in (*after.redo, *after.outstanding)}
        waited = {each.task_index for each in (*before.redo, *(each for each in before.outstanding if not each.steps))}
        gone = (waited | set(range(before.next_task, after.next_task))) - known
        unfinished = {each.number for each in after.outstanding}
        first_used = _ids(chain[len(begun) :]) - _ids(chain[: len(begun)])
        trained = {group for group in first_used if ticket_number(group) not in unfinished}
        if len(gone) > len(trained) + after.untrained:
            problems.append(
                f"between {older.name} and {newer.name}, {len(gone)} tasks ended: {len(trained)} were trained, and "
                f"{after.untrained} at most were dropped"
            )
    return problems


# -- Redis beside them -----------------------------------------------------------------------------------------------------
def _why_not_comparable(redis: RedisState, newest: CheckpointEvidence | None) -> str:
    """Return why Redis cannot be compared with the files; empty if it can."""
    if not redis.state:
        return "it holds nothing of this run; the next learner recovers from the newest checkpoint"
    if not redis.has_recovered:
        return "a learner is recovering, or ended while it recovered"
    mark = newest.position.mark if newest is not None and newest.position is not None else ""
    if mark and mark not in redis.marks:
        return "it is older than the newest checkpoint, which the next learner recovers from"
    return ""


def _steps_gone(saved: int, newest: CheckpointEvidence | None) -> list[str]:
    step = newest.step if newest is not None else -1
    if step >= saved:
        return []
    kept = f"the newest whole one is {newest.name}" if newest is not None else "there is none"
    return [f"Redis counts step {saved} as kept by a checkpoint, but {kept}: {saved - max(step, 0)} steps are lost"]


def _still_alive(redis: RedisState, settled: Sequence[JournaledStep], max_uses: int) -> list[str]:
    uses = _uses(settled)
    problems: list[str] = []
    for state in ("reserved", "ready", "again"):
        alive = [
            ticket
            for ticket, used in uses.items()
            if (record := redis.records.get(ticket)) is not None and record.state == state
            if state != "again" or len(used) >= max_uses
        ]
        if alive:
            problems.append(f"{len(alive)} groups of surviving steps are {state} in Redis: {_some(alive)}")
    return problems


def _numbers_back(redis: RedisState, journal: TrainedSteps, checkpoints: Sequence[CheckpointEvidence]) -> list[str]:
    problems: list[str] = []
    fence = max((each.life for each in checkpoints), default=0)
    if redis.number("fence") < fence:
        problems.append(f"the latest learner has fence {redis.number('fence')}, a checkpoint is of fence {fence}")
    version = max((life.newest for life in journal.lives), default=-1)
    if redis.number("highest", -1) < version:
        problems.append(f"Redis issued versions up to {redis.number('highest', -1)}, and {version} was trained")
    return problems


def _tasks(redis: RedisState, settled: Sequence[JournaledStep]) -> TaskCounts:
    alive = {ticket for ticket, record in redis.records.items() if record.state != "kept"}
    trained = _ids(settled) - alive
    begun, untrained = redis.number("next_task"), _untrained(redis)
    known = len(trained) + len(alive) + len(redis.redo)
    if (indexes := _indexes(settled)) is not None:
        flying = {redis.records[ticket].task_index for ticket in alive}
        known = len((indexes | flying | set(redis.redo)) & set(range(begun)))
    return TaskCounts(
        begun=begun,
        trained=len(trained),
        in_flight=len(alive),
        waiting=len(redis.redo),
        untrained=untrained,
        lost=max(0, begun - known - untrained),
    )


def _untrained(redis: RedisState) -> int:
    """TaskCounts that were dropped for good. An older release did not count them: then each that may have been counts."""
    if "untrained" in redis.state:
        return redis.number("untrained")
    return redis.dropped.get("no_signal", 0) + redis.dropped.get("failed", 0) + redis.number("quarantined")


def _lost(redis: RedisState, tasks: TaskCounts, settled: Sequence[JournaledStep], journal: TrainedSteps) -> list[str]:
    if not tasks.lost:
        return []
    here = _ids(settled) | redis.records.keys()
    elsewhere = {
        group.id: f"{group.id} ({group.task}), which step {step.number} of timeline {life.timeline} trained"
        for life in journal.lives
        for step in life.steps
        for group in step.groups
        if group.id not in here
    }
    hint = f"; in no surviving step any more: {_some(elsewhere.values(), 3)}" if elsewhere else ""
    if (indexes := _indexes(settled)) is not None and not tasks.untrained:
        flying = {record.task_index for record in redis.records.values()}
        hint = f": {_some(sorted(set(range(tasks.begun)) - indexes - flying - set(redis.redo)))}{hint}"
    return [
        f"{tasks.lost} of {tasks.begun} tasks are lost: trained in no surviving step, not in flight, not waiting, and not "
        f"dropped{hint}"
    ]


def _under_two_tickets(redis: RedisState, settled: Sequence[JournaledStep]) -> list[str]:
    """Check that a task is trained under one ticket; a group released from quarantine may be its task's second."""
    tickets: dict[int, set[str]] = defaultdict(set)
    for step in settled:
        for group in step.groups:
            if group.task_index is not None:
                tickets[group.task_index].add(group.id)
    for ticket, record in redis.records.items():
        if record.task_index in tickets:
            tickets[record.task_index].add(ticket)
    twice = {task: ids for task, ids in tickets.items() if len(ids) > 1}
    if len(twice) <= redis.number("readmitted"):
        return []
    task, ids = min(twice.items())
    return [f"{len(twice)} tasks that were trained have another ticket, for example task {task}: {_some(sorted(ids))}"]


# -- the archive -------------------------------------------------------------------------------------------------------
def _archive(evidence: Evidence, all_steps: Sequence[JournaledStep]) -> list[str]:
    if evidence.archived is None:
        return []
    steps = _uses(all_steps)
    unknown = [group for group in evidence.archived if group not in steps]
    wrong = [group for group, step in evidence.archived.items() if group in steps and step not in steps[group]]
    problems = [f"{len(unknown)} archived groups were trained by no step: {_some(unknown)}"] if unknown else []
    if wrong:
        problems.append(f"{len(wrong)} groups are archived under a step that did not train them: {_some(wrong)}")
    return problems


def _not_archived(evidence: Evidence, redis: RedisState, settled: Sequence[JournaledStep]) -> list[str]:
    """Check that spent groups since the oldest archived step are in the archive, wait in Redis, or were deleted and counted."""
    if not evidence.archived or redis.number("set_backs"):
        return []
    since = min(evidence.archived.values())
    kept = evidence.archived.keys() | redis.records.keys()
    gone = [group for group, used in _uses(settled).items() if used[-1] > since and group not in kept]
    if len(gone) <= redis.number("expired"):
        return []
    return [f"{len(gone)} spent groups are not in the archive, {redis.number('expired')} were let go: {_some(gone)}"]


# -- of steps ---------------------------------------------------------------------------------------------------------
def _uses(steps: Iterable[JournaledStep]) -> Mapping[str, Sequence[int]]:
    """Return group -> the steps that trained it, in order."""
    uses: dict[str, list[int]] = defaultdict(list)
    for step in steps:
        for group in step.groups:
            uses[group.id].append(step.number)
    return uses


def _ids(steps: Iterable[JournaledStep]) -> set[str]:
    return {group.id for step in steps for group in step.groups}


def _indexes(steps: Iterable[JournaledStep]) -> set[int] | None:
    """Return the tasks of these steps; None if an older release wrote the journal."""
    found = [group.task_index for step in steps for group in step.groups]
    known = {index for index in found if index is not None}
    return known if None not in found else None


def _some(things: Iterable[object], most: int = 5) -> str:
    shown = list(map(str, things))
    return ", ".join(shown[:most]) + (", ..." if len(shown) > most else "")
