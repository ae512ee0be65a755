"""Checks a round from client-side journals and the server's final content, without the buffer's code.

    python -m tests.chaos.auditor FOLDER        audits the folder of a round again; exit code 1 on any violation

Each check returns its violations, one sentence each. Surviving steps are those that the last checkpoint descends from.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from tests.chaos.evidence import Evidence

ALIVE = ("reserved", "ready", "again", "taken")


def violations(found: Evidence) -> dict[str, list[str]]:
    return {
        "lost": [*lost_groups(found), *skipped_tasks(found)],
        "trained twice": trained_twice(found),
        "versions": [*versions_back(found), *versions_reused(found)],
        "steps": [*steps_missing(found), *too_old(found)],
        "tickets": [*tickets_shared(found), *answers_wrong(found), *conservation(found)],
        "audit": [*found.final["audit"]],
        "supervisor": [*found.seen.get("problems", [])],
    }


def lost_groups(found: Evidence) -> list[str]:
    """Check that each stored group was trained, is still there, or is counted as dropped."""
    if found.is_set_back:
        return []  # what the server lost is rolled again: see skipped_tasks
    gone = found.stored - found.uses.keys() - found.records.keys()
    counted = int(found.final["dropped"].get("stale", 0)) + int(found.final["state"].get("quarantined", 0))
    refused_early = sum("quarantined" in line["answers"] for line in found.did("ended"))
    problems: list[str] = []
    if len(gone) > counted - refused_early:
        problems.append(f"{len(gone)} stored groups are gone, {counted - refused_early} are counted: {_some(gone)}")
    unheard = found.perhaps_stored - found.uses.keys() - found.records.keys()
    stale = int(found.final["dropped"].get("stale", 0))
    if found.settings["max_uses"] == 1 and stale > len(gone) + len(unheard):
        problems.append(f"{stale} groups are counted as stale, but only {len(gone)} (or {len(unheard)} more) are gone")
    spent = int(found.final["state"].get("spent", 0))
    trained = sum(1 for ticket in found.uses if found.records.get(ticket, ("", 0))[0] not in ALIVE)
    if spent != trained:
        problems.append(f"{spent} groups are spent, but the surviving steps trained {trained} that are not in the buffer")
    return problems


def skipped_tasks(found: Evidence) -> list[str]:
    """Check that each task that was begun was trained, had no signal, failed too often, or is in flight."""
    settled = {_task(group["task"]) for line in found.survived for group in line["groups"]}
    settled |= {task for _, task in found.records.values()}
    settled |= {int(entry.split()[0]) for entry in found.final["redo"]}
    settled |= {line["task"] for line in found.did("ends") if line["how"] == "no_signal"}
    failures = Counter(line["task"] for line in found.did("ends") if line["how"] in ("failed", "unsound"))
    poisoned = {line["ticket"] for line in found.did("poisoned")}
    failures.update({line["task"] for line in found.did("ends") if line["ticket"] in poisoned})
    settled |= {task for task, times in failures.items() if times >= found.settings["max_attempts"]}
    skipped = set(range(int(found.final["state"].get("next_task", 0)))) - settled
    return [f"{len(skipped)} tasks were begun and never finished: {_some(skipped)}"] if skipped else []


def trained_twice(found: Evidence) -> list[str]:
    problems: list[str] = []
    for line in found.survived:
        ids = [group["id"] for group in line["groups"]]
        if len(set(ids)) < len(ids):
            problems.append(f"step {line['step']} trained a group twice")
    most = found.settings["max_uses"]
    for ticket, steps in found.uses.items():
        if len(steps) > most:
            problems.append(f"group {ticket} was trained by the steps {steps}, but may be used {most} times")
    tickets: dict[str, set[str]] = defaultdict(set)
    for line in found.survived:
        for group in line["groups"]:
            tickets[group["task"]].add(group["id"])
    problems += [f"{task} was trained under the tickets {_some(ids)}" for task, ids in tickets.items() if len(ids) > 1]
    return problems


def versions_back(found: Evidence) -> list[str]:
    problems: list[str] = []
    last: dict[str, int] = defaultdict(lambda: -1)
    for line in found.did("live"):
        if line["version"] < last[line["role"]] and not found.is_set_back:
            problems.append(f"{line['role']} saw version {line['version']} live after version {last[line['role']]}")
        last[line["role"]] = max(last[line["role"]], line["version"])
    if found.checkpoint and int(found.final["state"]["live"]) != found.checkpoint["version"]:
        problems.append(f"version {found.final['state']['live']} is live, the checkpoint has {found.checkpoint['version']}")
    return problems


def versions_reused(found: Evidence) -> list[str]:
    """Check that a version is one step of one timeline, and that later learners have higher versions."""
    if found.is_set_back:
        return []  # the server may issue lost versions again
    meaning: dict[int, set[tuple[str, int]]] = defaultdict(set)
    lives: dict[str, int] = {line["timeline"]: line["fence"] for line in found.did("resumed")}
    by_fence: dict[int, list[int]] = defaultdict(list)
    for line in [*found.did("resumed"), *found.did("trained"), *found.did("publishes")]:
        meaning[line["version"]].add((line["timeline"], line["after"] if line["did"] == "resumed" else line["step"]))
        by_fence[lives[line["timeline"]]].append(line["version"])
    problems = [f"version {number} means {sorted(several)}" for number, several in meaning.items() if len(several) > 1]
    fences = sorted(by_fence)
    for earlier, later in pairwise(fences):
        if max(by_fence[earlier]) >= min(by_fence[later]):
            problems.append(f"fence {later} issued version {min(by_fence[later])}, fence {earlier} {max(by_fence[earlier])}")
    begun = [(line["life"], line["fence"]) for line in found.did("resumed")]
    if sorted(begun) != sorted(begun, key=lambda each: each[1]) or len({fence for _, fence in begun}) < len(begun):
        problems.append("fences do not grow from life to life")
    return problems


def steps_missing(found: Evidence) -> list[str]:
    problems: list[str] = []
    numbers = [line["step"] for line in found.survived]
    if numbers != list(range(1, found.checkpoint.get("step", 0) + 1)):
        problems.append(f"the checkpoint has {found.checkpoint.get('step', 0)} steps, the journals {len(numbers)}")
    if not numbers:
        problems.append("no step survived: the round tests nothing")
    wanted = found.settings["groups_per_step"]
    problems += [
        f"step {line['step']} has {len(line['groups'])} groups" for line in found.survived if len(line["groups"]) != wanted
    ]
    return problems


def too_old(found: Evidence) -> list[str]:
    return [
        f"step {line['step']} trained version {line['trained']} on {group['id']}, whose oldest token is of {group['oldest']}"
        for line in found.did("trained")
        for group in line["groups"]
        if line["trained"] - group["oldest"] > found.settings["max_age"]
    ]


def tickets_shared(found: Evidence) -> list[str]:
    """Check that a ticket is one attempt at one task, held by one worker."""
    if found.is_set_back:
        return []  # the server issues lost numbers again
    facts: dict[str, set[tuple[object, ...]]] = defaultdict(set)
    attempts: dict[tuple[int, int], set[str]] = defaultdict(set)
    for line in found.did("reserved"):
        facts[line["ticket"]].add((line["worker"], line["task"], line["attempt"], line["version"]))
        attempts[line["task"], line["attempt"]].add(line["ticket"])
    several = [ticket for ticket, each in facts.items() if len(each) > 1]
    problems = [f"tickets were given to several workers: {_some(several)}"] if several else []
    problems += [f"attempt {key[1]} of task {key[0]} is {_some(ids)}" for key, ids in attempts.items() if len(ids) > 1]
    return problems


def answers_wrong(found: Evidence) -> list[str]:
    """Check that replies to commits stay true."""
    if found.is_set_back:
        return []
    problems: list[str] = []
    stored_by: Counter[str] = Counter(
        line["ticket"] for line in found.did("ended") for answer in line["answers"] if answer == "stored"
    )
    problems += [f"{ticket} was stored {times} times" for ticket, times in stored_by.items() if times > 1]
    for line in found.did("ended"):
        if line["how"] == "twice" and line["answers"][0] in ("stored", "already") and line["answers"][1] != "already":
            problems.append(f"the repeated commit of {line['ticket']} returned {line['answers'][1]}")
    poisoned = {line["ticket"] for line in found.did("poisoned")}
    for ticket in (found.stored - poisoned) & found.final["ended"].keys():
        if found.final["ended"][ticket] != "already":
            problems.append(f"{ticket} was stored, but a repeated commit would return {found.final['ended'][ticket]}")
    return problems


def conservation(found: Evidence) -> list[str]:
    """Check that each ticket ever issued is in one place, and each payload belongs to a ticket."""
    final = found.final
    problems: list[str] = []
    places = {name: set(final[name]) for name in (*ALIVE, "kept")}
    for ticket, (state, _) in found.records.items():
        inside = [name for name, tickets in places.items() if ticket in tickets]
        if inside != [state]:
            problems.append(f"{ticket} says it is {state}, but is in {inside}")
    strays = set().union(*places.values()) - found.records.keys()
    problems += [f"tickets without a record: {_some(strays)}"] if strays else []
    if final["leases"].keys() != final["reserved"].keys():
        problems.append("leases and reserved tickets are not the same")
    held = places["ready"] | places["again"] | places["taken"] | places["kept"]
    if final["payloads"].keys() != held:
        problems.append(f"payloads and held groups differ: {_some(final['payloads'].keys() ^ held)}")
    state = {name: int(final["state"].get(name, 0)) for name in ("issued", "next_ticket", "spent", "quarantined")}
    ended = state["spent"] + state["quarantined"] + sum(map(int, final["dropped"].values()))
    alive = sum(len(places[name]) for name in ALIVE)
    if state["issued"] != ended + alive or (state["issued"] != state["next_ticket"] and not found.is_set_back):
        problems.append(f"{state['issued']} tickets of {state['next_ticket']} were issued: {ended} ended, {alive} are alive")
    return problems


def _task(key: str) -> int:
    return int(key.removeprefix("task-"))


def _some(ids: Iterable[object]) -> str:
    shown = sorted(map(str, ids))
    return ", ".join(shown[:5]) + (", ..." if len(shown) > 5 else "")


def main(folder: Path) -> int:
    found = violations(Evidence.of(folder))
    for kind, sentences in found.items():
        for sentence in sentences:
            print(f"{kind}: {sentence}")
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
