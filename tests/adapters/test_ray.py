"""Fleets on a real Ray cluster of several machines, which are raylets on this one: lost, added and taken away in mid-run."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from async_rl.config import Config
from async_rl.launch.ray import cluster as async_rl_cluster
from async_rl.launch.ray.cluster import ActorFailed, ActorLost
from async_rl.recording.reading import Recording
from async_rl.run_folders.folder import RunFolder
from tests.support.private_server import binaries, private_server
from tests.support.run_history import check, lives, ranks_of_newest
from tests.support.run_processes import TASKS, Program, audit, finished, program, read_config, write_config
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


@pytest.fixture(scope="module", autouse=True)
def own_folder() -> Iterator[None]:
    """Where Ray notes this machine's cluster: others that run here are not found. Ray's sockets need a short path."""
    with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else Ray asks for a token if this user has one
        yield


@contextmanager
def cluster(head: dict[str, float], **machines: dict[str, float]) -> Iterator[tuple[Cluster, dict[str, Any]]]:
    """A cluster whose head has these resources, and more machines with theirs, by name."""
    given = {"num_cpus": 4, "resources": head, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=given)
    try:
        yield made, {name: add(made, needs) for name, needs in machines.items()}
    finally:
        made.shutdown()


def add(made: Cluster, resources: dict[str, float], **more: Any) -> Any:
    return made.add_node(num_cpus=4, resources=resources, **more)


@contextmanager
def fleet(made: Cluster | None, path: Path, workers: int) -> Iterator[Program]:
    """The command that places the processes of a run, gone at the end."""
    words = ("launch", "ray", "@", path, "--workers", workers, *address_of(made))
    with program(path.parent, *words, warm=False) as command:
        yield command


def address_of(made: Cluster | None) -> tuple[str, ...]:
    """Words that name a cluster; None: it is found, as the one that this machine belongs to."""
    return ("--address", made.address) if made is not None else ()


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


def ask(path: Path, made: Cluster | None, *words: object) -> str:
    said = finished(path.parent, "fleet", *words, "@", path, *address_of(made), warm=False)
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


def test_a_fleet_loses_workers_and_learner_with_their_machines_grows_and_drains(tmp_path: Path) -> None:
    path, config = fleet_run(tmp_path, supervision={"restarts": 0})  # a lost machine is no crash
    with cluster({"worker": 1}, first={"learner": 1}, second={"worker": 1}) as (made, machines):
        with fleet(made, path, workers=2) as command:
            until_steps(config, command, 2)
            assert ask(path, made, "ls").count("worker-") == 2

            made.remove_node(machines["second"], allow_graceful=False)
            until_steps(config, command, 3)  # the other one works on

            made.remove_node(machines["first"], allow_graceful=False)
            command.until_says("learner has lost its machine")
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


def test_a_machine_with_an_address_of_its_own_that_joins_later_gets_weights(tmp_path: Path) -> None:
    with private_server(binaries()["bundled"]) as url:
        path, config = fleet_run(tmp_path, redis={"url": url}, wire={"insecure": True})
        with cluster({"learner": 1}) as (made, _), fleet(made, path, workers=1) as command:
            command.until_says("worker-0 waits for a machine with CPU: 1, worker: 1 free")
            add(made, {"worker": 1}, node_ip_address="127.0.0.2")
            until_steps(config, command, 3)
            assert "(127.0.0.2)" in ask(path, made, "ls")
            assert ask(path, made, "stop") == "the fleet drains\n"
            assert command.exit_code() == 0, command.output
        assert audit(path)["clean"]


def test_a_machine_that_joins_a_fleet_that_is_for_one_machine_is_told_with_the_way_out(tmp_path: Path) -> None:
    path, _ = fleet_run(tmp_path)
    with cluster({"learner": 1}) as (made, _), fleet(made, path, workers=1) as command:
        command.until_says("worker-0 waits for a machine")
        add(made, {}, node_ip_address="127.0.0.2")
        lacks = "redis.url is empty, but the Ray cluster has 2 machines: name a server that all of them reach (docs/redis.md)"
        command.until_says(
            f"127.0.0.2 joined the cluster, and what is placed there will fail: {lacks}, then launch the run again"
        )
        assert ask(path, made, "stop") == "the fleet drains\n"
        assert command.exit_code() == 0, command.output


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
        supervision={"restarts": 0},
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
    content |= {"model": {"name": "tests/tiny"}, "environments": [tasks]}
    path.write_text(yaml.safe_dump(content))
    with small_hub({"tests/tiny": write_folder(tmp_path / "model")}) as endpoint, cluster({}) as (made, _):

        def hub(machine: str) -> dict[str, str]:
            return {"HF_HOME": str(tmp_path / machine), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

        for role in ("learner", "worker"):
            made.add_node(num_cpus=4, resources={role: 1}, env_vars=hub(role))
        words = ("launch", "ray", "@", path, "--workers", 1, "--address", made.address)
        with program(tmp_path, *words, environment={**os.environ, **hub("launching")}, warm=False) as command:
            for machine in ("launching", "learner", "worker"):
                weights = f"{machine}/hub/models--tests--tiny/snapshots/{COMMIT}/*.safetensors"
                what = f"the {machine} machine has fetched the model"
                until(lambda weights=weights: [*tmp_path.glob(weights)], what, while_alive=command, within_s=STEPS_S)
            until_steps(config, command, 1)
            assert ask(path, made, "stop") == "the fleet drains\n"
            assert command.exit_code() == 0, command.output


CRASHES = """
import os
from dataclasses import dataclass
from pathlib import Path
from tests.support.run_tasks import Paced

@dataclass(kw_only=True)
class Crashes(Paced):
    repaired: str

    async def reward(self, task, response):
        if os.environ.get("MACHINE") == "bad" and not Path(self.repaired).exists():
            os._exit(1)
        return await super().reward(task, response)
"""


def test_a_worker_in_a_crash_loop_is_left_out_while_another_works_and_can_be_drained_and_tried_again(tmp_path: Path) -> None:
    repaired, crashing = tmp_path / "repaired", tmp_path / "crashing.py"
    crashing.write_text(CRASHES)
    policy = {"restarts": 1, "backoff_s": 0.1, "window_s": 600}
    path, config = fleet_run(tmp_path, tasks={"repaired": str(repaired)}, supervision=policy)
    path.write_text(path.read_text().replace(f"{TASKS}:Paced", f"{crashing}:Crashes"))
    with cluster({"learner": 1, "worker": 1}) as (made, _):
        add(made, {"worker": 1}, env_vars={"MACHINE": "bad"})
        with fleet(made, path, workers=2) as command:
            command.until_says("after 1 restarts within 600 s; the run continues without it and tries again in 600 s")
            (name,) = set(re.findall(r"(worker-\d) exited with code 1, after", command.output))
            until(lambda: f"{name}  left out" in ask(path, made, "ls"), f"{name} is left out", while_alive=command)
            assert ask(path, made, "drain", name) == f"{name} has drained\n"
            until(lambda: name not in ask(path, made, "ls"), f"{name} is gone", while_alive=command)
            assert ask(path, made, "drain", name).startswith(f"there is no worker '{name}'; there are worker-")

            assert ask(path, made, "scale", 2) == "2 workers, 1 before\n"
            repaired.touch()
            until(lambda: ask(path, made, "ls").count("(127.0.0.1)") == 4, "all have machines", while_alive=command)
            until_steps(config, command, 2)
            assert ask(path, made, "stop") == "the fleet drains\n"
            assert command.exit_code() == 0, command.output
        assert audit(path)["clean"]


def test_a_worker_whose_machine_will_be_taken_away_finishes_its_episodes_which_take_longer_than_a_look(tmp_path: Path) -> None:
    path, config = fleet_run(tmp_path, tasks={"pace_s": 6.0}, worker={"drain_s": 240})
    with cluster({"learner": 1}, leaving={"worker": 1}) as (made, machines):
        with fleet(None, path, workers=1) as command:
            until_steps(config, command, 1)
            add(made, {"worker": 1})
            drain(made, machines["leaving"], within_s=500)
            command.until_says("worker-0 leaves")
            until_steps(config, command, 3)  # more than it had sampled before: it has another machine
            assert command.output.count("worker-0 leaves") == 1
            assert ask(path, None, "stop") == "the fleet drains\n"
            assert command.exit_code() == 0, command.output
        ends = [event.fields for event in Recording(config.run_folder).events(kinds=("process",))]
        ended = [str(each["detail"]) for each in ends if each["name"] == "worker-0" and each["what"] in ("left", "lost")]
        assert ended == ["exited with code 0"] * 2, "none was ended by a second signal"
        assert audit(path)["clean"]


class Fails:
    """An actor on a machine where something is wrong."""

    def __init__(self, starts: bool) -> None:
        if not starts:
            raise ModuleNotFoundError("No module named 'async_rl'")

    async def run(self) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "config.yaml")

    async def wait(self) -> None:
        await asyncio.Event().wait()


def test_why_an_actor_has_ended_is_told_in_one_line() -> None:
    async def told(answer: Any) -> tuple[type[Exception], str]:
        with pytest.raises((ActorLost, ActorFailed)) as caught:
            await door.answer(answer)
        return caught.type, str(caught.value)

    async def all_told() -> None:
        has, lacks = (door.place(Fails, starts, resources={"CPU": 0}) for starts in (True, False))
        assert await told(lacks.run.remote()) == (ActorLost, "ModuleNotFoundError: No module named 'async_rl'")
        assert await told(has.run.remote()) == (ActorFailed, "OSError: [Errno 28] No space left on device: 'config.yaml'")
        waiting = has.wait.remote()
        door.kill(has)
        assert await told(waiting) == (ActorLost, "The actor is dead because it was killed by `ray.kill`.")

    with cluster({}) as (made, _), async_rl_cluster.Cluster(made.address) as door:
        asyncio.run(all_told())


def test_a_fleet_on_this_machine_alone_needs_no_cluster(tmp_path: Path) -> None:
    path = write_config(tmp_path, "alone", learner={"steps": 400, "checkpoint_every": 2}, worker={"processes": 3})
    config = read_config(path)
    as_a_user = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"} | {"HOME": str(tmp_path)}
    words = ("launch", "ray", "@", path, "--address", "local")
    with program(tmp_path, *words, environment=as_a_user, warm=False) as command:
        until_steps(config, command, 1)
        until(lambda: set(pids_of(config)) == {"buffer", "learner", *WORKERS}, "all have room", while_alive=command)
        command.signal(signal.SIGTERM)
        assert command.exit_code() == 0, command.output
    assert audit(path)["clean"]


WORKERS = ("worker-0", "worker-1", "worker-2")


def pids_of(config: Config) -> dict[str, int]:
    return json.loads((config.run_folder / "processes.json").read_text())


def test_a_worker_that_cannot_run_and_is_the_only_one_ends_the_fleet_with_its_reason(tmp_path: Path) -> None:
    path, config = fleet_run(tmp_path, supervision={"restarts": 1, "backoff_s": 0.1})
    changed = path.read_text().replace("Paced", "NoSuchThing")
    with cluster({"learner": 1, "worker": 1}) as (made, _):
        path.write_text(changed)
        with fleet(made, path, workers=1) as command:
            assert command.exit_code() == 2, command.output
            assert "NoSuchThing" in command.output
        until(lambda: not processes_of(config), "no process of the run is left")


def drain(made: Cluster, machine: Any, within_s: int = 60) -> None:
    """Tell the cluster that a machine will be taken away in so many seconds, as its provider would."""
    told = f"--reason DRAIN_NODE_REASON_PREEMPTION --reason-message spot --deadline-remaining-seconds {within_s}"
    words = ["drain-node", "--address", made.address, "--node-id", machine.node_id, *told.split()]
    subprocess.run([Path(sys.executable).with_name("ray"), *words], check=True, capture_output=True)
