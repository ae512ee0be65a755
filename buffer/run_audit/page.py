"""Prints the result of `async-rl audit`: a short table and one line per finding, or one JSON document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from buffer.run_audit.evidence import Evidence
from buffer.run_audit.rules import AuditVerdict
from buffer.tools.output import console, print_json, visible


def show(evidence: Evidence, verdict: AuditVerdict) -> None:
    page = console()
    for what, said in _rows(evidence, verdict):
        page.print(f"{what:<12} {visible(said)}")
    for each in verdict.unchecked:
        page.print(visible(f"NOT CHECKED: {each}"), style="yellow")
    for each in verdict.findings:
        page.print(visible(f"FOUND: {each}"), style="red")
    if verdict.findings:
        page.print(f"{len(verdict.findings)} findings")
    elif not verdict.unchecked:
        page.print("clean: every task is trained once, in flight, or dropped with a reason")


def show_json(evidence: Evidence, verdict: AuditVerdict) -> None:
    print_json(
        {
            "clean": not verdict.findings and not verdict.unchecked,
            "findings": verdict.findings,
            "unchecked": verdict.unchecked,
            "tasks": asdict(verdict.tasks) if verdict.tasks is not None else None,
            "dropped": dict(evidence.redis.dropped) if evidence.redis is not None else None,
            "steps": len(verdict.surviving),
            "rolled_back_steps": verdict.rolled_back,
            "lives": len(evidence.journal.lives) if evidence.journal is not None else 0,
            "checkpoints": [{"name": each.name, "step": each.step, "problem": each.problem} for each in evidence.checkpoints],
            "archived": len(evidence.archived) if evidence.archived is not None else None,
        }
    )


def _rows(evidence: Evidence, verdict: AuditVerdict) -> Iterator[tuple[str, str]]:
    journal, newest, tasks = evidence.journal, evidence.newest, verdict.tasks
    lives = len(journal.lives) if journal is not None else 0
    groups = len({group.id for step in verdict.surviving for group in step.groups})
    yield (
        "journal",
        f"{lives} learners; {len(verdict.surviving)} surviving steps of {groups} groups, {verdict.rolled_back} rolled back",
    )
    whole = sum(not each.problem for each in evidence.checkpoints)
    damaged = ", ".join(f"{each.name} is damaged" for each in evidence.checkpoints if each.problem)
    said = f"{whole} whole, the newest is {newest.name}" if newest is not None else "none is whole"
    yield "checkpoints", f"{said}; {damaged}" if damaged else said
    if evidence.archived is not None:
        yield "archive", f"{len(evidence.archived)} groups"
    if evidence.redis is not None and tasks is not None:
        redis = evidence.redis
        dropped = ", ".join(f"{reason} {number}" for reason, number in sorted(redis.dropped.items())) or "none"
        yield "redis", f"{redis.number('issued')} tickets, {redis.number('spent')} spent; dropped: {dropped}"
        yield (
            "tasks",
            f"{tasks.begun} begun: {tasks.trained} trained, {tasks.in_flight} in flight, {tasks.waiting} wait to be rolled "
            f"again, {tasks.untrained} dropped for good",
        )
