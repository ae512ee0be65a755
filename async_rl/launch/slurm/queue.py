"""The only door to Slurm: its commands, and what they print."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rl.errors import ConfigError

LEAVES = "async-rl: drains"
"""Comment of a job that was asked to drain and will not come back."""

_SHOWN = "%i|%T|%N|%r|%k|%j|%Z"

_UNANSWERED = ("Unable to contact slurm controller", "Socket timed out", "Zero Bytes were transmitted", "standby mode")
"""What a command says if the controller is away or too busy; every other refusal is an answer."""


class NoAnswer(ConfigError):
    """Slurm's controller does not answer now; it may later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job in the queue, or one task of an array."""

    id: str
    """As Slurm's commands take it: 12, or 12_3."""
    state: str
    """PENDING, RUNNING, COMPLETING, ..."""
    nodes: str
    reason: str
    """Why it waits."""
    name: str
    leaves: bool
    """It was asked to drain and will not come back."""

    @property
    def is_pending(self) -> bool:
        return self.state == "PENDING"

    @property
    def index(self) -> int | None:
        """Its index in an array; None: it is in none."""
        _, _, index = self.id.partition("_")
        return int(index) if index.isdecimal() else None


def jobs_in(folder: Path) -> list[Job]:
    """The user's jobs that wait or run with this working directory. Raises ConfigError."""
    rows = _slurm("squeue", "--me", "--noheader", "--array", f"--format={_SHOWN}").splitlines()
    return [job for row in rows if (job := parse_row(row, folder)) is not None]


def jobs_if_here(folder: Path) -> list[Job]:
    """As `jobs_in`; none if Slurm is not installed or not configured on this machine. Raises NoAnswer."""
    try:
        return jobs_in(folder)
    except NoAnswer:
        raise
    except ConfigError:
        return []


def parse_row(row: str, folder: Path) -> Job | None:
    """The job of a row of squeue; None if it belongs elsewhere."""
    job_id, state, nodes, reason, comment, name, place = row.split("|", maxsplit=6)
    if place != str(folder):
        return None
    return Job(id=job_id, state=state, nodes=nodes, reason=reason, name=name, leaves=comment == LEAVES)


def submit(script: Path, *options: str) -> str:
    """Submit a script and return the id of its job. Raises ConfigError."""
    return _slurm("sbatch", "--parsable", *options, str(script)).strip().partition(";")[0]


def cancel(jobs: Sequence[str]) -> None:
    """Cancel jobs, whether they wait or run. Raises NoAnswer."""
    _slurm("scancel", *jobs, may_be_gone=True)


def drain(job: Job) -> None:
    """Let a job end and not come back: at once if it waits, else by SIGTERM to its processes. Raises NoAnswer."""
    if job.is_pending:
        _slurm("scancel", "--state=PENDING", job.id, may_be_gone=True)
    _slurm("scontrol", "update", f"JobId={job.id}", f"Comment={LEAVES}", may_be_gone=True)  # it may have begun meanwhile
    _slurm("scancel", "--signal=TERM", job.id, may_be_gone=True)


def is_leaving(job_id: str) -> bool:
    """Whether a job was asked to drain before its processes could hear it. Raises NoAnswer."""
    return _field(job_id, "Comment") == LEAVES


def is_preempted(job_id: str) -> bool:
    """Whether Slurm takes a job's nodes for another one. Raises NoAnswer."""
    return _field(job_id, "PreemptTime") not in ("", "N/A")


def _field(job_id: str, name: str) -> str:
    """A field of a job; "" if it is gone. For the id that a task of an array shares with the array, squeue shows all tasks."""
    rows = _slurm("squeue", "--noheader", f"--jobs={job_id}", f"--Format=JobID:20,{name}:60", may_be_gone=True).splitlines()
    return next((value.strip() for own, _, value in (row.partition(" ") for row in rows) if own == job_id), "")


def has_gpus(partitions: Collection[str]) -> bool:
    """Whether one of these partitions has nodes with GPUs; of none, whether the default one has. Raises ConfigError."""
    rows = [row.split("|") for row in _slurm("sinfo", "--all", "--noheader", "--format=%P|%G").splitlines()]
    wanted = partitions or [name for name, _ in rows if name.endswith("*")] or [name for name, _ in rows]
    names = {name.rstrip("*") for name in wanted}
    return any("gpu" in resources for name, resources in rows if name.rstrip("*") in names)


def _slurm(*command: str, may_be_gone: bool = False) -> str:
    """Run a command and return what it prints; with `may_be_gone`, only NoAnswer is raised."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{command[0]} is not installed here: run this where jobs of Slurm are submitted, or write the scripts alone "
            "with --dry-run"
        ) from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        if any(text in done.stderr for text in _UNANSWERED):
            raise NoAnswer(f"{command[0]} gets no answer: {said}")
        if not may_be_gone:
            raise ConfigError(f"{command[0]} refuses: {said}")
    return done.stdout
