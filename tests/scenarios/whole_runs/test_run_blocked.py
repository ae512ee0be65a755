"""Code of an environment that never awaits blocks its worker: the run names it, replaces the worker, and goes on without it."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.run_history import last_step
from tests.support.run_processes import audit, program, read_config, write_config
from tests.support.waiting import until

BLOCKING = Path(__file__).with_name("blocking_tasks.py")


def write_blocking(folder: Path, name: str, **sections: Any) -> Path:
    """A run of two environments, of which one blocks."""
    path = write_config(folder, name, **sections)
    content = yaml.safe_load(path.read_text())
    content["environments"] = [{"type": f"{BLOCKING}:{kind}", "args": {"max_tokens": 8}} for kind in ("Blocks", "Awaits")]
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.timeout(900)
def test_a_blocked_worker_is_named_and_replaced_and_the_run_goes_on_without_what_blocked_it(tmp_path: Path) -> None:
    path = write_blocking(
        tmp_path,
        "blocked",
        learner={"steps": 12},
        worker={"stall_limit_s": 7, "breaker": {"pause_s": 3600}},
        leases={"ticket_s": 600},  # longer than the test: tickets come back because they are handed back
        supervision={"restarts": 0},  # a worker that was replaced has not crashed
    )
    # Which of the two lines of the loop it is at that moment is chance.
    named = re.compile(r"is blocked by environment 'Blocks' at blocking_tasks\.py:1[5-6] in reward, for \d+ s by now")
    with program(tmp_path, "run", "@", path) as run:
        until(lambda: named.search(run.output), "the console names what blocks the worker", while_alive=run)
        run.until_says("worker-0 exited with code 15 (EnvironmentBlocked); restarting")
        assert run.exit_code() == 0, run.output
    log = (read_config(path).run_folder / "logs" / "worker-0.log").read_text()
    assert "an environment is paused for" in log
    assert "Traceback" not in run.output + log
    said = audit(path)
    assert said["clean"]
    assert said["stats"]["dropped"]["abandoned"] > 0
    assert "lease_lost" not in said["stats"]["dropped"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_whose_worker_is_blocked_ends_on_ctrl_c_and_a_detached_environment_does_not_come_back(tmp_path: Path) -> None:
    path = write_blocking(tmp_path, "interrupted", learner={"steps": 4}, worker={"stall_limit_s": 3600, "drain_s": 3600})
    config = read_config(path)
    with program(tmp_path, "run", "@", path) as run:
        run.until_says("is blocked by environment 'Blocks'")
        detached = run_verb(tmp_path, "env", "detach", "Blocks", "@", config.run_folder / "config.yaml")
        assert detached == 0
        run.signal(signal.SIGINT)
        assert run.exit_code() == 0, run.output
    assert "did not drain" not in run.output
    with program(tmp_path, "run", "@", config.run_folder / "config.yaml") as again:
        assert again.exit_code() == 0, again.output
    assert last_step(config) == 4
    assert "is blocked" not in again.output
    said = audit(path)
    assert said["clean"]
    assert said["stats"]["dropped"]["detached"] > 0


def run_verb(folder: Path, *arguments: object) -> int:
    with program(folder, *arguments) as verb:
        until(verb.has_ended, "the verb ends")
        return verb.exit_code()
