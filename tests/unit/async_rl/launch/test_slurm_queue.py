"""What `async-rl launch slurm`, `fleet` and the jobs do with what Slurm's commands say, which here are scripts of the test."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from async_rl.cli.main import dispatch
from async_rl.config import Config
from async_rl.config.loading import load_file
from async_rl.errors import ConfigError
from async_rl.launch.slurm import queue
from async_rl.launch.slurm.learner_watch import LearnerWatch
from async_rl.launch.slurm.member import SlurmMember, end_run
from async_rl.launch.slurm.scripts import CONTINUES
from async_rl.supervision import Child, ChildSpec, RestartPolicy
from tests.support.repository import ROOT
from tests.support.waiting import PATIENCE_S, eventually

AWAY = "Unable to contact slurm controller (connect failure)"
GONE = "Invalid job id specified"


class Commands:
    """Commands of Slurm, of which each writes down how it was called. Those that are not written are not installed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.run_folder = folder / "runs" / "shapes"

    def write(self, name: str, script: str) -> None:
        path = self._folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        new, away = self._folder / "new", self._away(name)
        new.write_text(
            f"""#!/bin/bash
echo "{name} $*" >> {self._folder}/calls
if [ -e {away} ]; then /bin/rm {away}; echo "{AWAY}" >&2; exit 1; fi
{script}
"""
        )
        new.chmod(0o755)
        new.rename(path)  # a call that began is answered as before

    def lose_next(self, name: str) -> None:
        """The controller does not answer the next call of a command."""
        self._away(name).touch()

    def _away(self, name: str) -> Path:
        return self._folder / f"{name}-is-away"

    def fail(self, name: str, said: str) -> None:
        self.write(name, f"echo '{said}' >&2; exit 1")

    def queue(self, *jobs: str) -> None:
        """Each job: ID STATE KIND."""
        rows = [job.split() for job in jobs]
        shown = [f"{job}|{state}|node7|None||shapes-{kind}|{self.run_folder}" for job, state, kind in rows]
        self.write("squeue", "\n".join(f"echo '{row}'" for row in shown))

    @property
    def calls(self) -> list[str]:
        path = self._folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def launch(self, *words: str, **sections: object) -> int:
        path = self._folder / "own.yaml"
        path.write_text(yaml.safe_dump({"launch": {"slurm": sections}}))
        given = ("--run.name", "shapes", "--run.folder", str(self._folder / "runs"), "--redis.url", "redis://127.0.0.1")
        return dispatch(["launch", "slurm", "@", str(ROOT / "configs/quickstart.yaml"), "@", str(path), *given, *words])

    def config(self) -> Config:
        """Of a run that was launched."""
        return load_file(Config, self.run_folder / "config.yaml")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return Commands(tmp_path)


def written(folder: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_what_jobs_in_the_queue_read_is_not_written_again(slurm: Commands, words: tuple[str, ...]) -> None:
    assert slurm.launch("--device", "cpu", "--dry-run") == 0  # without Slurm: submitted elsewhere
    before = written(slurm.run_folder)
    slurm.queue("12 RUNNING learner", "13_0 PENDING worker")
    with pytest.raises(ConfigError, match=r"'shapes' already has jobs in Slurm's queue \(12, 13_0\), which read its scripts"):
        slurm.launch("--device", "cpu", "--workers", "7", *words)
    slurm.fail("squeue", AWAY)
    with pytest.raises(ConfigError, match=r"squeue gets no answer: Unable to contact slurm controller"):
        slurm.launch("--device", "cpu", "--workers", "7", *words)
    assert written(slurm.run_folder) == before


def test_a_script_that_slurm_refuses_takes_back_what_was_submitted_before_it(slurm: Commands) -> None:
    slurm.queue()
    refused = "case $* in *worker.sbatch) echo 'sbatch: error: Invalid qos specification' >&2; exit 1 ;; esac"
    slurm.write("sbatch", f"{refused}\ncase $* in *afterany:7*) echo 8 ;; *) echo 7 ;; esac")
    slurm.write("scancel", "")
    with pytest.raises(ConfigError, match=r"Invalid qos specification; what was submitted before it \(7, 8\) is cancelled"):
        slurm.launch("--device", "cpu", learner_jobs=2, worker_options=["--qos=none"])
    assert slurm.calls[-1] == "scancel 7 8"
    slurm.fail("scancel", AWAY)
    with pytest.raises(ConfigError, match=r"is still in the queue \(.*\): `scancel 7 8` ends it"):
        slurm.launch("--device", "cpu", learner_jobs=2)


@pytest.mark.parametrize(
    ("options", "learner_options", "on_gpus"),
    [
        ([], [], set[str]()),  # the default partition
        (["--partition=gpu"], [], {"learner", "worker"}),
        ([], ["-p gpu"], {"learner"}),
        (["--partition=long,gpu"], ["--partition=cpu"], {"worker"}),
    ],
)
def test_jobs_ask_for_gpus_where_their_partition_has_them(
    slurm: Commands, options: list[str], learner_options: list[str], on_gpus: set[str]
) -> None:
    slurm.queue()
    slurm.write("sinfo", "echo 'cpu*|(null)'; echo 'long|(null)'; echo 'gpu|gpu:h200:8(S:0-1)'")
    assert slurm.launch("--dry-run", options=options, learner_options=learner_options) == 0
    scripts = {path.stem: path.read_text() for path in (slurm.run_folder / "slurm").iterdir()}
    assert {kind for kind, script in scripts.items() if "--gres=gpu:1" in script} == on_gpus


def test_a_fleet_is_asked_on_slurm_while_its_jobs_are_in_the_queue(slurm: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    slurm.launch("--device", "cpu", "--dry-run")
    capsys.readouterr()
    path = ("@", str(slurm.run_folder / "config.yaml"))
    slurm.queue("12 RUNNING learner", "13_0 PENDING worker")
    assert dispatch(["fleet", "ls", *path]) == 0
    assert capsys.readouterr().out == "learner   node7, job 12\nworker-0  waits (None), job 13_0\n"
    asked = len(slurm.calls)
    with pytest.raises(ConfigError, match="Ray"):
        dispatch(["fleet", "ls", *path, "--address", "127.0.0.1:1"])
    assert len(slurm.calls) == asked

    elsewhere: tuple[Callable[[], None], ...] = (
        slurm.queue,  # the jobs have ended, or scripts were only written
        lambda: slurm.fail("squeue", "Could not establish a configuration source"),
        lambda: (slurm.run_folder.parents[1] / "bin" / "squeue").unlink(),
    )
    for change in elsewhere:
        change()
        with pytest.raises(ConfigError, match="neither this machine's Ray cluster nor Slurm's queue has this one"):
            dispatch(["fleet", "scale", "3", *path])
    slurm.fail("squeue", AWAY)
    with pytest.raises(ConfigError, match=r"squeue gets no answer: .* ask again, or name the --address"):
        dispatch(["fleet", "scale", "3", *path])


def test_a_learner_at_its_end_asks_a_controller_that_is_away_again(slurm: Commands) -> None:
    slurm.launch("--device", "cpu", "--dry-run")
    slurm.queue("12 RUNNING learner", "13_0 RUNNING worker", "13_1 PENDING worker")
    slurm.lose_next("squeue")
    slurm.write("scancel", "")
    slurm.lose_next("scancel")
    slurm.fail("scontrol", GONE)
    end_run(slurm.config(), "12", is_out_of_time=False)
    assert [call for call in slurm.calls if not call.startswith("squeue")] == [
        "scancel --state=PENDING 13_1",  # no answer
        "scancel --state=PENDING 13_1",
        "scontrol update JobId=13_1 Comment=async-rl: drains",
        "scancel --signal=TERM 13_1",
        "scontrol update JobId=13_0 Comment=async-rl: drains",
        "scancel --signal=TERM 13_0",
    ]


def test_a_task_that_shares_its_id_with_its_array_is_not_told_of_other_tasks(slurm: Commands) -> None:
    slurm.write("squeue", f"echo '5                   {queue.LEAVES}   '; echo '4                   (null)   '")
    assert [queue.is_leaving(job) for job in ("4", "5", "6")] == [False, True, False]
    slurm.write("squeue", "echo '5                   2026-11-26T16:09:06   '; echo '4                   N/A   '")
    assert [queue.is_preempted(job) for job in ("4", "5", "6")] == [False, True, False]


async def test_a_worker_ends_once_the_learner_that_was_there_is_gone(slurm: Commands) -> None:
    slurm.launch("--device", "cpu", "--dry-run")
    watch = LearnerWatch(slurm.config(), knows_learner=False)
    slurm.queue("13_0 RUNNING worker")
    assert not await watch.is_gone()  # the learner is submitted after it
    slurm.queue("13_0 RUNNING worker", "14 PENDING learner")
    assert not await watch.is_gone()
    slurm.lose_next("squeue")
    assert not await watch.is_gone()
    slurm.queue()  # not even the job that asks
    assert not await watch.is_gone()
    slurm.queue("13_0 RUNNING worker", "15 RUNNING evaluator")
    await watch.until_gone()


@pytest.mark.parametrize(("others", "code"), [(("12 RUNNING learner",), CONTINUES), ((), 0)])
async def test_a_worker_whose_time_is_over_is_queued_again_if_there_is_a_learner(
    slurm: Commands, others: tuple[str, ...], code: int
) -> None:
    slurm.launch("--device", "cpu", "--dry-run")
    slurm.queue("12 RUNNING learner", "13_0 RUNNING worker")
    asked, started = len(slurm.calls), asyncio.Event()
    has_no_handler = ["/bin/sleep", "600"]  # as a process that has just been started
    policy = RestartPolicy(silence_s=PATIENCE_S)
    spec = ChildSpec(name="worker-0", command=has_no_handler, environment={}, log=None, policy=policy)
    member = SlurmMember(
        Child(spec, on_start=lambda _name, _pid: started.set()), LearnerWatch(slurm.config(), knows_learner=False)
    )

    async def has_looked() -> bool:
        return len(slurm.calls) > asked

    async with asyncio.TaskGroup() as tasks:
        ended = tasks.create_task(member.run(leaves=False))
        await started.wait()
        await eventually(has_looked, "the worker has seen the learner in the queue")
        slurm.queue("13_0 RUNNING worker", *others)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert ended.result() == code
