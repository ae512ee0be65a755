"""Tables of what the processes of a run say of their machines, and what the doctor says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from async_rl.board.machines import MachineNote
from buffer.doctor.fleet_facts import FleetFacts, FleetProcess
from buffer.doctor.fleet_rules import comparable, judge_fleet

SOFTWARE = {"async_rl": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "megatron-core": "0.16.1"}


def process(
    name: str, host: str, *, ahead_s: float = 0.0, gpu: str = "", driver: str = "", software: Mapping[str, str] | None = None
) -> FleetProcess:
    """`software`: where it differs from SOFTWARE."""
    note = MachineNote(process=name, host=host, software={**SOFTWARE, **(software or {})}, gpu=gpu, driver=driver, time=0.0)
    return FleetProcess(name=name, host=host, note=note, ahead_s=ahead_s)


HERE = process("doctor", "here").note
LEARNER = process("the learner", "a", ahead_s=-0.2)
FLEET = FleetFacts(learner=LEARNER, members=(process("w1", "b"), process("w2", "b", ahead_s=0.4)))


def lines(facts: FleetFacts, here: MachineNote | None = HERE) -> list[str]:
    assert here is not None
    return [each.line for each in judge_fleet(facts, here)]


def test_a_fleet_whose_processes_are_alike() -> None:
    assert lines(FLEET) == [
        "ok    fleet: the learner, 2 workers, on 2 machines",
        "ok    fleet software: the same everywhere: async_rl 0.1.0, python 3.11, torch 2.13.0, megatron-core 0.16.1",
        "ok    fleet clocks: at most 0.4 s from that of Redis",
    ]


def test_an_evaluator_that_takes_weights_is_no_worker() -> None:
    facts = replace(FLEET, members=(*FLEET.members, replace(process("e1", "c"), is_evaluator=True)))
    assert lines(facts)[0] == "ok    fleet: the learner, 2 workers, 1 evaluator, on 3 machines"


def test_a_run_without_processes() -> None:
    assert lines(FleetFacts()) == ["ok    fleet: the run has neither a learner nor workers now"]
    assert lines(FleetFacts(problem="no")) == ["look  fleet: no — ask as a user of the run, such as its monitor"]


@pytest.mark.parametrize(
    ("different", "line"),
    [
        (
            {"torch": "2.12.0"},
            "look  fleet software: torch is 2.13.0 for the learner, w1, w2, this machine, 2.12.0 for w3 — install torch 2.13.0 "
            "everywhere, that of the learner: other releases may compute other numbers",
        ),
        (
            {"python": "3.12.1"},
            "look  fleet software: python is 3.11 for the learner, w1, w2, this machine, 3.12 for w3 — install python 3.11 "
            "everywhere",
        ),
        (
            {"async_rl": "absent"},
            "look  fleet software: async_rl is 0.1.0 for the learner, w1, w2, this machine, absent for w3 — install async_rl "
            "0.1.0 everywhere, that of the learner: other releases may compute other numbers",
        ),
    ],
)
def test_software_that_differs(different: dict[str, str], line: str) -> None:
    facts = replace(FLEET, members=(*FLEET.members, process("w3", "c", software=different)))
    assert line in lines(facts)
    (same,) = (each for each in lines(facts) if each.startswith("ok    fleet software"))
    assert not {name for name in different if f"{name} " in same}


def test_the_learners_release_is_the_one_to_install_though_most_have_another() -> None:
    facts = replace(FLEET, learner=process("the learner", "a", software={"torch": "2.14.0"}))
    (line,) = (each for each in lines(facts) if each.startswith("look"))
    assert "torch is 2.13.0 for w1, w2, this machine, 2.14.0 for the learner — install torch 2.14.0" in line


def test_this_machine_is_compared_before_it_joins() -> None:
    here = process("doctor", "here", software={"torch": "2.12.0"}).note
    (line,) = (each for each in lines(FLEET, here) if each.startswith("look"))
    assert "2.12.0 for this machine" in line


def test_what_a_worker_says_beyond_what_is_asked_is_left_out() -> None:
    talkative = {"torch": "9" * 10_000, "x" * 10_000: "1"}
    facts = FleetFacts(members=tuple(process(name, "b", software=talkative) for name in ("w1", "w2")))
    assert max(map(len, lines(facts))) < 500


@pytest.mark.parametrize(
    ("package", "version", "compared"),
    [
        ("torch", "2.13.0+cpu", "2.13.0"),  # built for another device
        ("torch", "2.13.0", "2.13.0"),
        ("python", "3.11.7", "3.11"),
        ("megatron-core", "0.16.1", "0.16.1"),
        ("megatron-core", "absent", "absent"),
    ],
)
def test_what_must_be_equal_of_a_version(package: str, version: str, compared: str) -> None:
    assert comparable(package, version) == compared


def test_a_process_that_says_nothing_is_named() -> None:
    facts = replace(FLEET, members=(*FLEET.members, FleetProcess(name="old", host="c", note=None)))
    assert (
        "look  fleet: old says nothing of its software — wait if it is still starting; else start it again" in lines(facts)[1]
    )


def test_gpus_and_drivers() -> None:
    one, two = (process(name, name, gpu="H200", driver="580.1") for name in ("w1", "w2"))
    assert "ok    fleet gpus: H200 for w1, w2, driver 580.1" in lines(FleetFacts(members=(one, two)))
    other = process("w2", "c", gpu="L40S", driver="550.2")
    assert any(
        line.startswith("look  fleet gpus: the driver is 580.1 for w1, 550.2 for w2")
        for line in lines(FleetFacts(members=(one, other)))
    )


@pytest.mark.parametrize(
    ("ahead_s", "said"),
    [(1.5, "w1 on b: 1.5 s ahead of Redis"), (-90.0, "w1 on b: 90.0 s behind Redis"), (0.9, ""), (-0.9, "")],
)
def test_clocks(ahead_s: float, said: str) -> None:
    facts = replace(FLEET, members=(process("w1", "b", ahead_s=ahead_s),))
    (line,) = (each for each in lines(facts) if "fleet clocks" in each)
    assert line.startswith("look  fleet clocks") == bool(said)
    assert said in line


def test_a_line_names_a_few_of_many() -> None:
    away: Any = tuple(process(f"w{number}", "b", ahead_s=5.0, software={"torch": "2.12.0"}) for number in range(100))
    found = lines(FleetFacts(learner=LEARNER, members=away))
    assert any("2.12.0 for w0, w1, w2, w3 and 96 more" in line for line in found)
    assert any(line.startswith("look  fleet clocks") and "; and 96 more" in line for line in found)
