"""Fleets on a real Ray cluster of several machines, which are raylets on this one: lost, added and taken away in mid-run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.config import Config
from async_rl.run_folders.folder import RunFolder
from tests.support.run_history import check, lives, ranks_of_newest
from tests.support.run_processes import Program, audit, finished, program, read_config, write_config
from tests.support.small_hub import COMMIT, small_hub
from tests.support.small_models import write_folder
from tests.support.waiting import until

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # on loopback only; read when Ray is imported
pytest.importorskip("ray")
from ray.cluster_utils import Cluster

STEPS_S = 300.0
"""For some steps after processes were started anew, on a busy machine."""


pytestmark = pytest.mark.timeout(1200)
"""Three raylets, each with processes of its own, start in a minute on two idle cores."""


@contextmanager
def cluster(head: dict[str, float], **machines: dict[str, float]) -> Iterator[tuple[Cluster, dict[str, Any]]]:
    """A cluster whose head has these resources, and more machines with theirs, by name."""
    given = {"num_cpus": 4, "resources": head, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=given)
    try:
        yield made, {name: add(made, needs) for name, needs in machines.items()}
    finally:
        made.shutdown()


def add(made: Cluster, resources: dict[str, float]) -> Any:
    return made.add_node(num_cpus=4, resources=resources)


@contextmanager
def fleet(made: Cluster, path: Path, workers: int) -> Iterator[Program]:
    """The command that places the processes of a run, gone at the end."""
    with program(
        path.parent, "launch", "ray", "@", path, "--workers", workers, "--address", made.address, warm=False
    ) as command:
        yield command


def fleet_run(folder: Path, *, parallel: dict[str, int] | None = None, **sections: dict[str, Any]) -> tuple[Path, Config]:
    learner = {"steps": 400, "checkpoint_every": 2, "optimizer": {"learning_rate": 1e-3}, "parallel": parallel or {}}
    launch = {"learner_resources": {"learner": 1}, "worker_resources": {"worker": 1}}
    path = write_config(folder, "fleet", learner=learner, **{"launch": launch, **sections})
    return path, read_config(path)


def steps_of(config: Config) -> int:
    row = RunFolder(path=config.run_folder).last_row()
    return 0 if row is None else row.step


def until_steps(config: Config, command: Program, more: int) -> None:
    before = steps_of(config)
    until(lambda: steps_of(config) >= before + more, f"{more} more steps", while_alive=command, within_s=STEPS_S)


def ask(path: Path, made: Cluster, *words: object) -> str:
    said = finished(path.parent, "fleet", *words, "@", path, "--address", made.address, warm=False)
    assert said.returncode == 0, said.stderr
    return said.stdout


def processes_of(config: Config) -> list[int]:
    """Processes whose command line or configuration belongs to the run."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if (
            entry.name.isdecimal()
            and "-m" in words
            and any(str(config.run_folder) in word or "async-rl-" in word for word in words)
        ):
            found.append(int(entry.name))
    return found


def test_a_fleet_loses_workers_and_learner_with_their_machines_grows_and_ends_by_itself(tmp_path: Path) -> None:
    path, config = fleet_run(tmp_path)
    with cluster({"worker": 1}, first={"learner": 1}, second={"worker": 1}) as (made, machines):
        with fleet(made, path, workers=2) as command:
            until_steps(config, command, 2)
            assert ask(path, made, "ls").count("worker-") == 2

            made.remove_node(machines["second"], allow_graceful=False)
            until_steps(config, command, 3)  # the other one works on

            made.remove_node(machines["first"], allow_graceful=False)
            command.until_says("learner was ended by SIGKILL")
            add(made, {"learner": 1, "worker": 2})
            until_steps(config, command, 3)  # resumed from the checkpoint; the lost worker is back as well
            assert ask(path, made, "scale", 3) == "3 workers, 2 before\n"
            until(lambda: "waits for" not in ask(path, made, "ls"), "three workers have machines", while_alive=command)
            assert ask(path, made, "scale", 1) == "1 workers, 3 before\n"
            until_steps(config, command, 2)

            assert ask(path, made, "stop") == "the fleet drains\n"
            assert command.exit_code() == 0, command.output
        assert audit(path)["clean"]
        until(lambda: not processes_of(config), "no process of the run is left")


def test_a_fleet_whose_launcher_is_killed_leaves_no_process(tmp_path: Path) -> None:
    path, config = fleet_run(tmp_path)
    with cluster({"learner": 1, "worker": 1}) as (made, _), fleet(made, path, workers=1) as command:
        until_steps(config, command, 1)
        command.signal(signal.SIGKILL)  # the actors are its own
        until(lambda: not processes_of(config), "no process of the run is left")


def test_a_fleet_whose_cluster_loses_its_head_leaves_no_process_and_is_resumed_in_another(tmp_path: Path) -> None:
    path, config = fleet_run(tmp_path)
    with cluster({}, only={"learner": 1, "worker": 1}) as (made, machines), fleet(made, path, workers=1) as command:
        until_steps(config, command, 3)
        made.remove_node(made.head_node, allow_graceful=False)

        def has_ended() -> bool:
            machines["only"].live_processes()  # reaps its raylet, else Ray's workers take it for alive
            return not processes_of(config)

        until(has_ended, "no process of the run is left", within_s=STEPS_S)  # Ray gives its head up after a minute
        assert command.exit_code() != 0
    with cluster({"learner": 1, "worker": 1}) as (made, _), fleet(made, path, workers=1) as command:
        command.until_says("resumes from step")
        until_steps(config, command, 1)
        assert ask(path, made, "stop") == "the fleet drains\n"
        assert command.exit_code() == 0, command.output
    assert audit(path)["clean"]


def test_ranks_on_two_machines_end_and_begin_together_and_processes_leave_a_machine_that_is_taken_away(tmp_path: Path) -> None:
    path, config = fleet_run(
        tmp_path,
        launch={"learner_nodes": 2, "learner_resources": {"learner": 1}, "worker_resources": {"worker": 1}},
        parallel={"processes": 2},
    )
    with cluster({"learner": 1}, second={"learner": 1}, third={"worker": 1}) as (made, machines):
        with fleet(made, path, workers=1) as command:
            until_steps(config, command, 2)
            (learners,) = [line for line in ask(path, made, "ls").splitlines() if line.startswith("learner")]
            assert learners.count("127.0.0.1") == 2

            made.remove_node(machines["second"], allow_graceful=False)
            command.until_says("learner waits for a machine")  # rank 0 may notice the loss before Ray does
            add(made, {"learner": 1})
            until_steps(config, command, 3)

            add(made, {"worker": 1})
            drain(made, machines["third"])
            command.until_says("worker-0 leaves")
            until(lambda: "waits" not in ask(path, made, "ls"), "the worker has another machine", while_alive=command)
            until_steps(config, command, 3)
            assert ask(path, made, "stop") == "the fleet drains\n"
            assert command.exit_code() == 0, command.output
        assert audit(path)["clean"]


def test_a_learner_goes_on_with_the_machine_that_is_left_and_takes_the_next_one_that_joins(tmp_path: Path) -> None:
    path, config = fleet_run(
        tmp_path,
        launch={
            "learner_nodes": 2,
            "learner_nodes_min": 1,
            "learner_resize_s": 5,
            "learner_resources": {"learner": 1},
            "worker_resources": {"worker": 1},
        },
        parallel={"processes": 2},
    )
    with cluster({"learner": 1, "worker": 1}, second={"learner": 1}) as (made, machines):
        with fleet(made, path, workers=1) as command:
            until(lambda: ranks_of_newest(config) == 2, "both machines have trained", while_alive=command, within_s=STEPS_S)

            made.remove_node(machines["second"], allow_graceful=False)
            command.until_says("learner resumes on 1 of 2 machines instead of 2: for 5 s it has had room on 1")
            until(lambda: ranks_of_newest(config) == 1, "one machine trains", while_alive=command, within_s=STEPS_S)
            assert hosts_of_learner(path, made) == 1

            before = len(lives(config))
            add(made, {"learner": 1})
            command.until_says("learner resumes on 2 of 2 machines instead of 1: for 5 s it has had room on 2")
            until(lambda: ranks_of_newest(config) == 2, "both machines train", while_alive=command, within_s=STEPS_S)
            assert hosts_of_learner(path, made) == 2
            handed_over, resumed = lives(config)[before - 1 : before + 1]
            assert resumed.resumed_after == handed_over.steps[-1].number, "a planned change repeats no step"

            assert ask(path, made, "stop") == "the fleet drains\n"
            assert command.exit_code() == 0, command.output
        assert audit(path)["clean"]
        check(config, steps=steps_of(config))


def hosts_of_learner(path: Path, made: Cluster) -> int:
    (row,) = [line for line in ask(path, made, "ls").splitlines() if line.startswith("learner")]
    return row.count("127.0.0.1")


def test_each_machine_fetches_the_model_that_the_run_names(tmp_path: Path) -> None:
    path, config = fleet_run(tmp_path)
    content = yaml.safe_load(path.read_text())
    del content["tokenizer"]
    tasks = {"type": "even_digits", "args": {"max_tokens": 8, "prompt_digits": 3}}
    content |= {"model": {"name": "tests/tiny"}, "environments": [tasks], "learner": {"steps": 2}}
    path.write_text(yaml.safe_dump(content))
    with small_hub({"tests/tiny": write_folder(tmp_path / "model")}) as endpoint, cluster({}) as (made, _):

        def hub(machine: str) -> dict[str, str]:
            return {"HF_HOME": str(tmp_path / machine), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

        for role in ("learner", "worker"):
            made.add_node(num_cpus=4, resources={role: 1}, env_vars=hub(role))
        words = ("launch", "ray", "@", path, "--workers", 1, "--address", made.address)
        with program(tmp_path, *words, environment={**os.environ, **hub("launching")}, warm=False) as command:
            assert command.exit_code() == 0, command.output
    assert steps_of(config) == 2
    for machine in ("launching", "learner", "worker"):
        assert [*tmp_path.glob(f"{machine}/hub/models--tests--tiny/snapshots/{COMMIT}/*.safetensors")], machine


def test_a_worker_that_cannot_start_is_tried_again_later_and_the_last_one_ends_the_fleet(tmp_path: Path) -> None:
    path, config = fleet_run(tmp_path, supervision={"restarts": 1, "backoff_s": 0.1})
    changed = path.read_text().replace("Paced", "NoSuchThing")
    with cluster({"learner": 1, "worker": 1}) as (made, _):
        path.write_text(changed)
        with fleet(made, path, workers=1) as command:
            assert command.exit_code() == 2, command.output
            assert "NoSuchThing" in command.output
        until(lambda: not processes_of(config), "no process of the run is left")


def drain(made: Cluster, machine: Any) -> None:
    """Tell the cluster that a machine will be taken away in a minute, as its provider would."""
    told = "--reason DRAIN_NODE_REASON_PREEMPTION --reason-message spot --deadline-remaining-seconds 60"
    words = ["drain-node", "--address", made.address, "--node-id", machine.node_id, *told.split()]
    subprocess.run([Path(sys.executable).with_name("ray"), *words], check=True, capture_output=True)
