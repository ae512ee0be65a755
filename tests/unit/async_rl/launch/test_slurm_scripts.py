"""What the scripts for Slurm say, and what the rows of its queue mean."""

import subprocess
from pathlib import Path

import pytest
from pydantic import ValidationError

from async_rl.cli.main import dispatch
from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.launch.slurm import fleet, queue
from async_rl.launch.slurm.scripts import CONTINUES, KINDS, PREEMPTED, RESTARTS, STABLE_S, partitions_of, scripts
from tests.support.repository import ROOT


def config(**sections: object) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "shapes", "folder": "/data/my runs"},
            "model": {"size": {"hidden": 32, "layers": 1, "heads": 2}},
            "environments": [{"type": "even_digits"}],
            **sections,
        }
    )


def options(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_a_learner_on_two_nodes_asks_for_an_equal_part_of_its_ranks_on_each() -> None:
    given = config(
        learner={"parallel": {"processes": 16}},
        launch={
            "learner_nodes": 2,
            "learner_resources": {"CPU": 64},
            "slurm": {
                "options": ["--time=60"],
                "learner_options": ["--exclusive"],
                "worker_options": ["--mem=8G"],
                "warn_s": 90,
            },
        },
        evaluation={"every": 5},
    )
    made = scripts(given, on_gpus=KINDS)
    assert list(made) == ["learner", "worker", "evaluator"]
    learner = options(made["learner"])
    assert learner[-5:] == ["--nodes=2", "--cpus-per-task=64", "--gres=gpu:8", "--time=60", "--exclusive"]
    assert "srun --wait=60 --ntasks-per-node=1 " in made["learner"]
    assert {"--requeue", "--signal=USR1@90", "--chdir='/data/my runs/shapes'"} <= set(learner)
    assert options(made["worker"])[-2:] == ["--time=60", "--mem=8G"]


def test_a_kind_of_gpu_replaces_any_gpu() -> None:
    made = scripts(config(launch={"worker_resources": {"gpu:l40s": 1, "nvme": 2}}), on_gpus=KINDS)
    assert "--gres=gpu:l40s:1,nvme:2" in options(made["worker"])
    assert not [option for option in options(scripts(config(), on_gpus=())["worker"]) if "gres" in option]


@pytest.mark.parametrize(
    ("kind", "code", "exits", "requeues"),
    [
        ("worker", 0, 0, False),
        ("worker", CONTINUES, 0, True),
        ("worker", PREEMPTED, 0, True),
        ("worker", 137, 0, True),
        ("worker", 2, 2, False),
        ("learner", CONTINUES, 0, False),
        ("learner", PREEMPTED, 0, True),
        ("learner", 137, 0, True),
        ("learner", 138, 0, True),
        ("learner", 12, 12, False),
    ],
)
def test_what_a_script_does_with_an_exit_code(tmp_path: Path, kind: str, code: int, exits: int, *, requeues: bool) -> None:
    assert ended(tmp_path, kind, code) == (exits, requeues)


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_is_killed_soon_after_each_start_is_not_queued_for_ever(tmp_path: Path, kind: str) -> None:
    """A learner that runs out of memory at its first step, say."""
    for _ in range(RESTARTS + 1):
        assert ended(tmp_path, kind, PREEMPTED) == (0, True)
    for _ in range(RESTARTS):
        assert ended(tmp_path, kind, 137) == (0, True)
    assert ended(tmp_path, kind, 137, ran_s=STABLE_S) == (0, True), "it had worked, so counting begins again"
    for _ in range(RESTARTS - 1):
        assert ended(tmp_path, kind, 137) == (0, True)
    assert ended(tmp_path, kind, 137) == (137, False)


def ended(folder: Path, kind: str, code: int, *, ran_s: int = 0) -> tuple[int, bool]:
    """The exit code of a script whose processes end with `code`, and whether it asked to be queued again."""
    asked = folder / "asked"
    asked.unlink(missing_ok=True)
    for name, text in (("srun", f"exit {code}"), ("scontrol", f'echo "$@" > {asked}')):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "12", "SLURM_CPUS_PER_TASK": "1"}
    script = scripts(config(evaluation={"every": 5}), on_gpus=())[kind]
    (folder / "slurm").mkdir(exist_ok=True)
    done = subprocess.run(["bash", "-c", f"SECONDS={ran_s}\n{script}"], env=environment, cwd=folder)
    assert not asked.exists() or asked.read_text() == "requeue 12\n"
    return done.returncode, asked.exists()


def test_a_dry_run_writes_scripts_and_prints_their_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--run.name", "shapes", "--run.folder", str(tmp_path), "--redis.url", "redis://127.0.0.1", "--device", "cpu")
    assert dispatch(["launch", "slurm", "@", str(ROOT / "configs/quickstart.yaml"), *given, "--dry-run"]) == 0
    written = [tmp_path / "shapes" / "slurm" / f"{kind}.sbatch" for kind in ("learner", "worker")]
    assert capsys.readouterr().out.split() == [str(path) for path in written]
    assert all(path.read_text().startswith("#!/bin/bash\n") for path in written)


def test_rows_of_the_queue_belong_to_the_run_by_their_folder() -> None:
    row = f"12_3|RUNNING|node7|None|{queue.LEAVES}|shapes-worker|/data/my runs/shapes"
    job = queue.parse_row(row, Path("/data/my runs/shapes"))
    assert job is not None
    assert (job.index, job.leaves, job.is_pending) == (3, True, False)
    assert (fleet.name_of(config(), job), fleet.where(job)) == ("worker-3", "node7, job 12_3, drains")
    assert queue.parse_row(row, Path("/data/other")) is None


def test_a_run_that_jobs_could_not_share_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"redis\.url is empty, but jobs of Slurm run on several machines"):
        fleet.check(config())
    with pytest.raises(ConfigError, match=r"wire\.insecure is false"):
        fleet.check(config(redis={"url": "rediss://store:6379"}))
    fleet.check(config(redis={"url": "rediss://store:6379"}, wire={"insecure": True}))


@pytest.mark.parametrize("option", ["--job-name=mine", "-J mine", "--chdir=/tmp", "-D/tmp"])
def test_an_option_that_hides_a_job_from_its_run_is_refused(option: str) -> None:
    given = config(redis={"url": "redis://127.0.0.1"}, launch={"slurm": {"worker_options": [option]}})
    with pytest.raises(ConfigError, match=r"found by their names and by their working directory; take out"):
        fleet.check(given)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], []),
        (["--time=60", "--exclusive"], []),
        (["--partition=a100,h200", "-N2"], ["a100", "h200"]),
        (["--partition=cpu", "-p gpu --mem 8G"], ["gpu"]),  # as for sbatch, the last one counts
        (["-pgpu"], ["gpu"]),
    ],
)
def test_partitions_that_options_name(options: list[str], named: list[str]) -> None:
    assert partitions_of(options) == named


def test_an_option_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match="'partition=gpu' is not an option of sbatch, such as --partition=gpu"):
        config(launch={"slurm": {"options": ["partition=gpu"]}})
