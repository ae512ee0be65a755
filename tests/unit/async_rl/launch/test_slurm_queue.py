"""What `async-rl launch slurm`, `fleet` and the jobs do with what Slurm's commands say, which here are scripts of the test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from async_rl.cli.main import dispatch
from async_rl.errors import ConfigError
from tests.support.repository import ROOT

AWAY = "Unable to contact slurm controller (connect failure)"


class Commands:
    """Commands of Slurm, of which each writes down how it was called. Those that are not written are not installed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.run_folder = folder / "runs" / "shapes"

    def write(self, name: str, script: str) -> None:
        path = self._folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f"""#!/bin/bash
echo "{name} $*" >> {self._folder}/calls
{script}
"""
        )
        path.chmod(0o755)

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
