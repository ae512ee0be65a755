"""The parent of ranks that share a machine, with real processes and signals: their environment, and that they end together."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import ConfigError
from async_rl.supervision.processes.ranks import STORE_VARIABLE
from learner.ranks.place import RankPlace, place_from
from learner.ranks.rendezvous import open_local_rendezvous
from tests.support.waiting import PATIENCE_S, until

RANK = """
import json, os, pathlib, signal, sys

rank, what = int(os.environ["RANK"]), sys.argv[1]
store = os.stat(os.environ["ASYNC_RL_RANKS_STORE"])
seen = {"pid": os.getpid(), "store": [store.st_dev, store.st_ino, store.st_nlink], "safe": sys.flags.safe_path, **os.environ}
pathlib.Path(f"seen-{rank}.part").write_text(json.dumps(seen))
if what == "stubborn" and rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(f"seen-{rank}.part").rename(f"seen-{rank}")
print(f"rank {rank} is here", flush=True)
os.mkfifo(f"wait-{rank}") if not os.path.exists(f"wait-{rank}") else None
if what == "ends":
    sys.exit(0)
if what == "mistake":
    sys.exit("one sentence")
open(f"wait-{rank}").read()  # until the test says so
match what, rank:
    case "fails", 1:
        sys.exit(5)
    case "is killed", 1:
        os.kill(os.getpid(), signal.SIGKILL)
    case "stubborn", 0:
        sys.exit(3)
"""
RANKS = 2


class Parent:
    output = ""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self._folder = folder

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def seen(self, rank: int) -> dict[str, Any]:
        """What the rank found, once it has."""
        until((self._folder / f"wait-{rank}").exists, f"rank {rank} is here", while_alive=self)
        return json.loads((self._folder / f"seen-{rank}").read_text())

    def lets_go(self, rank: int) -> None:
        self.seen(rank)
        (self._folder / f"wait-{rank}").write_text("")

    def ended(self) -> tuple[int, str]:
        """Its exit code and what it said; nothing of it is left."""
        said, _ = self.process.communicate(timeout=PATIENCE_S)
        for path in self._folder.glob("seen-?"):
            seen = json.loads(path.read_text())
            with suppress(ProcessLookupError):
                process = os.pidfd_open(int(seen["pid"]))
                ends = select.poll()  # unlike select, it takes any descriptor
                ends.register(process, select.POLLIN)
                assert ends.poll(30_000), "a rank lives on"
                os.close(process)
        return self.process.returncode, said


@contextmanager
def parent(folder: Path, what: str) -> Iterator[Parent]:
    (folder / "rank_program.py").write_text(RANK)
    line = [sys.executable, "-P", "-m", "async_rl.supervision.processes.ranks", str(RANKS), str(folder / "logs")]
    line += ["rank_program", what]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    process = subprocess.Popen(
        line, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    with process:
        try:
            yield Parent(process, folder)
        finally:
            process.kill()


def test_ranks_get_their_number_and_a_private_rendezvous(tmp_path: Path) -> None:
    with parent(tmp_path, "waits") as ranks:
        found = [ranks.seen(rank) for rank in range(RANKS)]
        for rank, seen in enumerate(found):
            names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME")
            assert [seen[name] for name in names] == [str(rank), str(rank), "2", "2", "lo"]
            assert seen["store"][2] == 0, "it has no name that a killed parent could leave behind"
            assert seen["safe"]
            ranks.lets_go(rank)
        assert found[0]["store"] == found[1]["store"]
        assert ranks.ended() == (0, "rank 0 is here\n")
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "rank 1 is here\n"


@pytest.mark.parametrize(
    ("what", "code", "how"), [("fails", 5, "exited with code 5 (FleetMismatch)"), ("is killed", 137, "was ended by SIGKILL")]
)
def test_the_rank_that_fails_first_gives_the_group_its_exit_code(tmp_path: Path, what: str, code: int, how: str) -> None:
    with parent(tmp_path, what) as ranks:
        ranks.seen(0)
        ranks.lets_go(1)  # rank 0 would wait for ever
        found, said = ranks.ended()
    assert found == code
    assert said.splitlines()[1:] == [
        f"rank 1 of 2 {how}",
        f"The last lines of {tmp_path}/logs/rank-1.log:",
        "  rank 1 is here",
    ]


def test_an_error_of_all_ranks_is_printed_once(tmp_path: Path) -> None:
    with parent(tmp_path, "mistake") as ranks:
        assert ranks.ended() == (1, "rank 0 is here\none sentence\n")


def test_a_rank_that_outlives_rank_0_is_killed(tmp_path: Path) -> None:
    with parent(tmp_path, "stubborn") as ranks:
        ranks.seen(1)
        ranks.lets_go(0)
        assert ranks.ended()[0] == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_all_ranks(tmp_path: Path, number: signal.Signals) -> None:
    with parent(tmp_path, "waits") as ranks:
        for rank in range(RANKS):
            ranks.seen(rank)
        ranks.process.send_signal(number)
        assert ranks.ended()[0] == 128 + signal.SIGTERM


def test_ranks_die_with_their_parent_and_leave_nothing_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with parent(tmp_path, "stubborn") as ranks:
        for rank in range(RANKS):
            ranks.seen(rank)
        ranks.process.kill()
        assert ranks.ended()[0] == -signal.SIGKILL
    assert list(temporary.iterdir()) == []


# -- which rank a process is ------------------------------------------------------------------------------------------


def test_a_process_learns_its_place_from_any_launcher() -> None:
    assert place_from({}) == RankPlace()
    assert place_from({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}) == RankPlace()
    here = place_from({"RANK": "1", "WORLD_SIZE": "2", STORE_VARIABLE: "/folder/store"})
    assert here == RankPlace(rank=1, world_size=2, file=Path("/folder/store"))
    master = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node", "MASTER_PORT": "29500"}
    assert place_from(master) == RankPlace(rank=1, world_size=2, has_master=True)
    torchrun = place_from({**master, "TORCHELASTIC_RUN_ID": "none"})
    assert torchrun == RankPlace(rank=1, world_size=2, has_master=True, is_under_torchrun=True)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "1", "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE 2"),
        ({"RANK": "1"}, "RANK is 1 and WORLD_SIZE 1"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "this is rank 1 of 2 .* no store for the rendezvous is configured"),
    ],
)
def test_a_rank_that_would_train_alone_is_refused(environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        open_local_rendezvous(place_from(environment))
