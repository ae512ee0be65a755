"""What another user of the machine reaches of two ranks that share it: no port, and no file over which they meet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from async_rl.supervision import children_of
from tests.scenarios.training.test_train_run import NEVER, write
from tests.scenarios.training.train_stage import config
from tests.support.listening import IS_TOLD, listeners
from tests.support.run_processes import program
from tests.support.waiting import PATIENCE_S, until

STORE = "async-rl-ranks"
"""The name of the file in memory over which the ranks meet."""
READ_AS_NOBODY = """
import json, os, sys

os.setgroups([])
os.setgid(65534)
os.setuid(65534)
opened = []
for reach in (os.listdir, lambda folder: open(sys.argv[2]).read()):
    try:
        opened.append(repr(reach(sys.argv[1])))
    except PermissionError:
        pass
print(json.dumps(opened))
"""


def stores_of(pid: int) -> list[Path]:
    """The stores that a process has open, by its own names for them."""
    found: list[Path] = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if STORE in str(file.readlink()):
                found.append(file)
    return found


@pytest.mark.skipif(not IS_TOLD, reason="needs Linux to tell which ports a process has")
def test_another_user_reaches_no_port_and_no_file_of_the_ranks(tmp_path: Path) -> None:
    run = {"name": "two", "folder": str(tmp_path / "runs")}
    learner = {"steps": NEVER, "parallel": {"processes": 2}}
    path = write(tmp_path, config("sft", run=run, learner=learner, metrics={"console": True}))
    with program(tmp_path, "train", "sft", "@", path) as training:
        training.until_says("step 2/")
        parent = json.loads((tmp_path / "runs" / "two" / "processes.json").read_text())["learner"]
        ranks = children_of(parent)
        assert len(ranks) == 2
        assert [place for pid in (parent, *ranks) for place in listeners(pid)] == []

        [store] = stores_of(ranks[0])
        assert store.stat().st_size > 0
        assert store.parent.stat().st_mode & 0o077 == 0
        if os.geteuid() == 0:
            line = [sys.executable, "-c", READ_AS_NOBODY, str(store.parent), str(store)]
            assert json.loads(subprocess.run(line, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout) == []

        training.until_says("step 4/")
        training.signal(signal.SIGTERM)
        assert training.exit_code() == 0, training.output
    until(lambda: not store.exists(), "the store is gone")
