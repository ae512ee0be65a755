"""Pure: whether the processes of a run fit each other: their software, drivers and clocks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from async_rl.board.machines import MachineNote
from async_rl.doctor.verdict import Verdict, look, ok
from buffer.board import shortened
from buffer.doctor.fleet_facts import FleetFacts, FleetProcess
from buffer.doctor.redis_rules import SKEW_S

NAMED = 4
"""Processes that a line names."""


def judge_fleet(facts: FleetFacts, here: MachineNote) -> Iterator[Verdict]:
    """`here`: what a process of this machine would say."""
    if facts.problem:
        yield look("fleet", facts.problem, "ask as a user of the run, such as its monitor")
        return
    if not facts.processes:
        yield ok("fleet", "the run has neither a learner nor workers now")
        return
    hosts = {each.host for each in facts.processes if each.host}
    evaluators = sum(each.is_evaluator for each in facts.members)
    counts = [_counted(len(facts.members) - evaluators, "worker"), *([_counted(evaluators, "evaluator")] if evaluators else [])]
    learner = "the learner" if facts.learner is not None else "no learner"
    yield ok("fleet", f"{learner}, {', '.join(counts)}, on {_counted(len(hosts), 'machine')}")
    if silent := [each for each in facts.processes if each.note is None]:
        yield look(
            "fleet",
            f"{_named(silent)} {'says' if len(silent) == 1 else 'say'} nothing of its software",
            "wait if it is still starting; else start it again with this async_rl: it has an older one, or Redis was emptied",
        )
    this = FleetProcess(name="this machine", host=here.host, note=here)
    yield from _judge_software([*facts.processes, this])
    yield from _judge_gpus(facts.processes)
    yield from _judge_clocks(facts.processes)


def _judge_software(processes: Sequence[FleetProcess]) -> Iterator[Verdict]:
    known = [(each, each.note.software) for each in processes if each.note is not None]
    same: list[str] = []
    for package in known[-1][1]:  # of this machine: the others' lists came over the network
        found = _by_value((each, comparable(package, software.get(package, "absent"))) for each, software in known)
        if len(found) == 1:
            same.append(f"{package} {next(iter(found))}")
            continue
        is_computing = package != "python"
        yield look(
            "fleet software",
            f"{package} is {_differing(found)}",
            f"install {package} {_wanted(known, package)} everywhere"
            + (", that of the learner: other releases may compute other numbers" if is_computing else ""),
        )
    if same:
        yield ok("fleet software", f"the same everywhere: {', '.join(same)}")


def _wanted(known: Sequence[tuple[FleetProcess, Mapping[str, str]]], package: str) -> str:
    """The learner's version, which comes first; without a learner, that of most."""
    values = [comparable(package, software.get(package, "absent")) for _, software in known]
    return values[0] if known[0][0].name == "the learner" else Counter(values).most_common(1)[0][0]


def comparable(package: str, version: str) -> str:
    """What must be equal of a version: not for which device it was built, nor the last number of Python's."""
    public = shortened(version.partition("+")[0])
    return ".".join(public.split(".")[:2]) if package == "python" else public


def _judge_gpus(processes: Sequence[FleetProcess]) -> Iterator[Verdict]:
    with_gpu = [(each, each.note) for each in processes if each.note is not None and each.note.gpu]
    if not with_gpu:
        return
    models = _by_value((each, note.gpu) for each, note in with_gpu)
    drivers = _by_value((each, note.driver) for each, note in with_gpu)
    if len(drivers) > 1:
        yield look(
            "fleet gpus",
            f"the driver is {_differing(drivers)}",
            "install one driver everywhere: NCCL between different ones is not tested",
        )
    else:
        yield ok("fleet gpus", f"{_differing(models)}, driver {shortened(next(iter(drivers)))}")


def _judge_clocks(processes: Sequence[FleetProcess]) -> Iterator[Verdict]:
    known = [(each, each.ahead_s) for each in processes if each.ahead_s is not None]
    if not known:
        return
    away = [(each, ahead_s) for each, ahead_s in known if abs(ahead_s) > SKEW_S]
    if away:
        listed = "; ".join(
            f"{_named([each])} on {shortened(each.host)}: {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} Redis"
            for each, ahead_s in away[:NAMED]
        )
        more = f"; and {len(away) - NAMED} more" if len(away) > NAMED else ""
        yield look("fleet clocks", f"{listed}{more}", "start a time service (chrony) on these machines")
    else:
        yield ok("fleet clocks", f"at most {max(abs(ahead_s) for _, ahead_s in known):.1f} s from that of Redis")


def _by_value(pairs: Iterable[tuple[FleetProcess, str]]) -> dict[str, list[FleetProcess]]:
    """Value -> the processes that have it; the most frequent first."""
    found = defaultdict[str, list[FleetProcess]](list)
    for process, value in pairs:
        found[value].append(process)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _differing(found: Mapping[str, Sequence[FleetProcess]]) -> str:
    return ", ".join(f"{shortened(value)} for {_named(processes)}" for value, processes in found.items())


def _named(processes: Sequence[FleetProcess]) -> str:
    names = [shortened(each.name) for each in processes]
    return ", ".join(names) if len(names) <= NAMED else f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
