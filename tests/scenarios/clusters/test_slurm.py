"""Fleets on a real Slurm cluster of two nodes: arrays that grow and shrink, killed tasks, time limits, a lost node."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.checkpoints.manifest import candidates, read_manifest
from async_rl.config import Config
from async_rl.config.loading import load_file
from buffer.server.embedded.programs import find_binary
from tests.scenarios.clusters.served_redis import PASSWORD, served_redis
from tests.support.repository import ROOT
from tests.support.run_history import check, last_step, lives
from tests.support.run_processes import TASKS, finished
from tests.support.slurm_cluster import SlurmCluster, missing, slurm_cluster
from tests.support.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.timeout(900),
]

EVENT_S = 300.0
"""For what takes several processes that import torch, one after the other, on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    cluster: SlurmCluster
    folder: Path
    config: Config

    @property
    def path(self) -> Path:
        return self.config.run_folder / "config.yaml"

    @property
    def environment(self) -> dict[str, str]:
        return self.cluster.environment | {"ASYNC_RL_REDIS_PASSWORD": PASSWORD}

    def ask(self, *words: object) -> str:
        said = finished(self.folder, "fleet", *words, "@", self.path, environment=self.environment)
        assert said.returncode == 0, said.stderr
        return said.stdout

    def rows(self) -> dict[str, str]:
        """What `fleet ls` says of each process."""
        said = finished(self.folder, "fleet", "ls", "@", self.path, environment=self.environment)
        return dict(line.split(maxsplit=1) for line in said.stdout.splitlines())

    def until_row(self, name: str, text: str) -> str:
        """Wait until `fleet ls` says this of a process; return all that it says of it."""
        return until(lambda: row if text in (row := self.rows().get(name, "")) else None, f"{name}: {text}", within_s=EVENT_S)

    def until_steps(self, more: int) -> None:
        before = last_step(self.config)
        until(lambda: last_step(self.config) >= before + more, f"{more} more steps", within_s=EVENT_S)

    def log(self, name: str) -> str:
        """What a process and its predecessors printed; `learner-*`: all jobs of the chain."""
        return "".join(path.read_text() for path in sorted((self.config.run_folder / "logs").glob(f"{name}.log")))

    def until_said(self, name: str, text: str, times: int = 1) -> None:
        until(lambda: self.log(name).count(text) >= times, f"{name} says {text!r} {times} times", within_s=EVENT_S)

    def signal(self, name: str, number: str) -> None:
        job = self.until_row(name, "job ").rpartition("job ")[2]
        self.cluster.ask("scancel", f"--signal={number}", job)

    def kill(self, name: str) -> None:
        """Kill what Slurm watches of a process, as a node without memory does; the process itself ends with it."""
        ours = f"SLURM_ARRAY_TASK_ID={name.removeprefix('worker-')}\0"
        (pid,) = [
            pid
            for pid in processes_of(self.config)
            if Path(f"/proc/{pid}/cmdline").read_text().split("\0")[1:4] == ["-P", "-m", "async_rl.launch.slurm.member"]
            and ours in Path(f"/proc/{pid}/environ").read_text()
        ]
        os.kill(pid, signal.SIGKILL)

    def running_learner(self) -> str:
        """The id of the learner's job that runs."""
        rows = self.cluster.ask("squeue", "--noheader", "--format=%i %T %j").splitlines()
        return next(row for row in rows if "RUNNING fleet-l" in row).split()[0]

    @contextmanager
    def preempted(self) -> Iterator[None]:
        """Another job has all nodes while inside."""
        wanted = ("--partition=urgent", "--nodes=2", "--exclusive", "--chdir=/", "--output=/dev/null", "--wrap=sleep infinity")
        job = self.cluster.ask("sbatch", "--parsable", *wanted).strip()
        asked = ("squeue", "--noheader", f"--jobs={job}", "--format=%T")
        until(lambda: self.cluster.ask(*asked).strip() == "RUNNING", "another job has the nodes", within_s=EVENT_S)
        yield
        self.cluster.ask("scancel", job)

    def until_ranks(self, wanted: int) -> None:
        """Wait until so many data-parallel ranks have written the newest checkpoint."""
        folder = self.config.run_folder / "checkpoints"
        until(
            lambda: (found := candidates(folder)) and read_manifest(found[0]).layout.data == wanted,
            f"{wanted} ranks write a checkpoint",
            within_s=EVENT_S,
        )

    def until_nodes_are_up(self) -> None:
        asked = ("sinfo", "--noheader", "--Node", "--format=%t")
        until(lambda: not {"down", "down*", "unk*", "idle*"} & set(self.cluster.ask(*asked).split()), "all nodes are up")

    def until_empty(self) -> None:
        until(lambda: not self.cluster.ask("squeue", "--noheader"), "the queue is empty", within_s=EVENT_S)


@contextmanager
def fleet(folder: Path, *words: object, **sections: dict[str, Any]) -> Iterator[Fleet]:
    """The quickstart, scaled down, submitted to a cluster; everything is gone at the end."""
    with served_redis(find_binary()) as url, slurm_cluster(["first", "second"]) as cluster:
        path = folder / "small.yaml"
        content = {
            "run": {"name": "fleet", "folder": str(folder / "runs")},
            "redis": {"url": url},
            "model": {"size": {"hidden": 32, "layers": 1, "heads": 2}},
            "environments": [{"type": f"{TASKS}:Paced", "args": {"max_tokens": 8, "pace_s": 1.0}}],
            "batch": {"groups_per_step": 2, "group_size": 2, "bin_tokens": 256, "drop_no_signal": False},
            "leases": {"ticket_s": 3, "learner_s": 3, "member_s": 3},
            "worker": {"groups_in_flight": 4, "drain_s": 5},
            "device": "cpu",
        }
        path.write_text(yaml.safe_dump({**content, **sections}))
        files = ("@", ROOT / "configs/quickstart.yaml", "@", path)
        environment = cluster.environment | {"ASYNC_RL_REDIS_PASSWORD": PASSWORD}
        written = finished(folder, "launch", "slurm", *files, *words, "--dry-run", environment=environment)
        assert (written.returncode, cluster.ask("squeue", "--noheader")) == (0, ""), written.stderr
        said = finished(folder, "launch", "slurm", *files, *words, environment=environment)
        assert said.returncode == 0, said.stderr
        config = load_file(Config, folder / "runs" / "fleet" / "config.yaml")
        made = Fleet(cluster=cluster, folder=folder, config=config)
        try:
            yield made
            until(lambda: not processes_of(config), "no process of the run is left")
            audited = finished(folder, "audit", "@", made.path, environment=made.environment)
            assert audited.returncode == 0, audited.stdout
        except BaseException:
            for log in sorted((config.run_folder / "logs").glob("*.log")):
                print(f"== {log.name}", log.read_text()[-3000:], sep="\n")
            print(subprocess.run(["squeue", "--array"], env=cluster.environment, capture_output=True, text=True).stdout)
            raise


def processes_of(config: Config) -> list[int]:
    """Processes on any node whose command line names the run's folder."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if entry.name.isdecimal() and "-m" in words and any(str(config.run_folder) in word for word in words):
            found.append(int(entry.name))
    return found


def test_an_array_grows_and_shrinks_a_killed_task_is_queued_again_and_a_chain_trains_to_the_last_step(tmp_path: Path) -> None:
    with fleet(
        tmp_path,
        "--workers",
        1,
        learner={"steps": 400, "checkpoint_every": 20, "optimizer": {"learning_rate": 1e-3}},
        launch={"slurm": {"learner_jobs": 2, "options": ["--time=60"]}},
    ) as run:
        run.until_steps(2)
        assert set(run.rows()) == {"learner", "worker-0"}  # of the chain, the row of the job that waits comes first or last
        again = finished(tmp_path, "launch", "slurm", "@", run.path, environment=run.environment)
        assert (again.returncode, "already has jobs in Slurm's queue" in again.stderr) == (2, True)

        assert run.ask("scale", 3) == "3 workers, 1 before\n"
        run.until_said("worker-2", "first weights loaded")
        run.kill("worker-0")
        run.until_said("worker-0", "first weights loaded", times=2)
        assert run.ask("drain", "worker-2") == "worker-2 drains\n"
        assert run.ask("scale", 1) == "1 workers, 2 before\n"
        until(lambda: set(run.rows()) == {"learner", "worker-0"}, "two workers have drained", within_s=EVENT_S)

        run.cluster.ask("scancel", "--signal=USR1", run.running_learner())
        run.until_said("learner-*", "resumes from step")
        run.signal("worker-0", "USR1")  # its time is nearly over: it drains, and is queued again
        run.until_said("worker-0", "first weights loaded", times=3)
        run.until_empty()
        check(run.config, steps=400)
        assert len(lives(run.config)) == 2
        written = [file.read_text() for file in (run.path, *(run.config.run_folder / "slurm").iterdir())]
        assert not any(PASSWORD in text for text in written)


@pytest.mark.parametrize("partition", ["main", "graced"])
def test_preempted_jobs_are_queued_again(tmp_path: Path, partition: str) -> None:
    with fleet(
        tmp_path,
        "--workers",
        1,
        learner={"steps": 10_000, "checkpoint_every": 2, "optimizer": {"learning_rate": 1e-3}},
        launch={"slurm": {"options": ["--time=60", f"--partition={partition}"]}},
    ) as run:
        run.until_steps(2)
        with run.preempted():
            run.until_row("learner", "waits")
            run.until_row("worker-0", "waits")
        run.until_said("learner-*", "resumes from step")
        run.until_said("worker-0", "first weights loaded", times=2)
        run.until_steps(2)
        assert run.ask("stop") == "the fleet drains\n"
        run.until_empty()
        check(run.config, steps=last_step(run.config))


def test_a_cancelled_task_drains_and_workers_end_with_the_last_learner_that_is_cancelled(tmp_path: Path) -> None:
    with fleet(
        tmp_path,
        "--workers",
        2,
        learner={"steps": 10_000, "checkpoint_every": 2, "optimizer": {"learning_rate": 1e-3}},
        launch={"slurm": {"learner_jobs": 2, "options": ["--time=60"]}},
    ) as run:
        run.until_said("worker-1", "first weights loaded")
        run.until_steps(2)
        run.cluster.ask("scancel", run.until_row("worker-1", "job ").rpartition("job ")[2])
        until(lambda: set(run.rows()) == {"learner", "worker-0"}, "the cancelled worker has ended", within_s=EVENT_S)
        run.cluster.ask("scancel", run.running_learner())
        run.until_said("learner-*", "resumes from step")
        run.until_steps(2)
        run.cluster.ask("scancel", run.running_learner())
        run.until_said("worker-0", "no learner job of this run any more")
        run.until_empty()
        check(run.config, steps=last_step(run.config))


def test_a_learner_goes_on_with_the_node_that_is_left_and_has_both_in_its_next_job(tmp_path: Path) -> None:
    with fleet(
        tmp_path,
        "--workers",
        1,
        learner={
            "steps": 10_000,
            "checkpoint_every": 2,
            "optimizer": {"learning_rate": 1e-3},
            "parallel": {"processes": 2},
        },
        launch={
            "learner_nodes": 2,
            "learner_nodes_min": 1,
            "slurm": {"learner_jobs": 2, "options": ["--time=60"], "worker_options": ["--nodelist=first"]},
        },
    ) as run:
        run.until_ranks(2)
        run.cluster.lose_node("second")
        run.until_ranks(1)
        run.cluster.start_node("second")
        run.until_nodes_are_up()
        running = run.running_learner()
        run.cluster.ask("scancel", "--signal=USR1", running)  # its time is nearly over
        run.until_ranks(2)
        assert run.running_learner() != running
        assert run.ask("stop") == "the fleet drains\n"
        run.until_empty()
        check(run.config, steps=last_step(run.config))


def test_a_learner_on_two_nodes_hands_over_before_its_time_limit_and_a_worker_leaves_a_lost_node(tmp_path: Path) -> None:
    with fleet(
        tmp_path,
        "--workers",
        1,
        learner={
            "steps": 10_000,
            "checkpoint_every": 20,
            "optimizer": {"learning_rate": 1e-3},
            "parallel": {"processes": 2},
        },
        launch={
            "learner_nodes": 2,
            "slurm": {"learner_jobs": 8, "warn_s": 45, "learner_options": ["--time=2"], "worker_options": ["--time=60"]},
        },
    ) as run:
        run.until_steps(2)
        run.until_said("learner-*", "resumes from step")  # after at most two minutes, without a request
        node = run.until_row("worker-0", "job ").partition(",")[0]
        run.cluster.lose_node(node)
        run.cluster.start_node(node)
        run.until_said("worker-0", "first weights loaded", times=2)
        assert run.ask("stop") == "the fleet drains\n"
        run.until_empty()
