"""The faults that are injected into a run. Each is injected, removed if it lasts, and returns what it has hit.

They act on what the run uses: processes by signals, connections by the proxy, files by a limit on their size (writes are
short, then fail, as on a full disk), ports by connecting. Only the server's clock is set back.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from async_rl.checkpoints.manifest import candidates
from tests.chaos.pipeline.processes import descendants, listening_ports
from tests.chaos.pipeline.servers import NetworkBetween, OutsideServer
from tests.chaos.pipeline.stage import MAX_AGE, Stage, Struck

DAY_S = 86_400
SCANS = 200
"""Connections per port, opened and closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a fault may act on."""

    stage: Stage
    random: Random
    server: OutsideServer | None
    network: NetworkBetween | None


ALL_NEW = MAX_AGE + 2
"""Steps after which a group must have trained that was rolled out after the first of them: the slots hold no more before it."""


def strike(kind: str, scene: Scene) -> Struck:
    return _FAULTS[kind](scene)


# -- processes ----------------------------------------------------------------------------------------------------------
def _signal_one(scene: Scene, role: str, number: signal.Signals) -> int | None:
    pids = [scene.server.pid] if role == "server" and scene.server is not None else scene.stage.pids(role)
    if not pids:
        return None
    chosen = scene.random.choice(sorted(pids))
    with suppress(ProcessLookupError):
        os.kill(chosen, number)
    return chosen


def _kill_learner(scene: Scene) -> Struck:
    _signal_one(scene, "learner", signal.SIGKILL)
    return Struck(role="learner", ends_learner=True)


def _kill_worker(scene: Scene) -> Struck:
    _signal_one(scene, "worker", signal.SIGKILL)
    return Struck(role="worker", steps=ALL_NEW)


def _kill_server(scene: Scene) -> Struck:
    if scene.server is None:
        _signal_one(scene, "server", signal.SIGKILL)
    else:
        scene.server.kill()
        scene.server.start()
    return Struck(role="server")


def _kill_keeper(scene: Scene) -> Struck:
    _signal_one(scene, "keeper", signal.SIGKILL)
    return Struck(role="server")


def _kill_supervisor(scene: Scene) -> Struck:
    scene.stage.kill_supervisor()
    return Struck(role="supervisor", steps=ALL_NEW, ends_learner=True)


def _paused(role: str, seconds: tuple[float, float]) -> Callable[[Scene], Struck]:
    def pause(scene: Scene) -> Struck:
        pid = _signal_one(scene, role, signal.SIGSTOP)
        time.sleep(scene.random.uniform(*seconds))  # the length of the pause is the fault
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return Struck(role=f"{role} (paused)")

    return pause


# -- network ------------------------------------------------------------------------------------------------------------
def _network(scene: Scene) -> NetworkBetween:
    assert scene.network is not None
    return scene.network


def _reset_network(scene: Scene) -> Struck:
    _network(scene).reset()
    return Struck(role="network")


def _cut_network(scene: Scene) -> Struck:
    _network(scene).cut()
    return Struck(role="network")


def _bad_weather(*, delay_s: tuple[float, float] = (0.0, 0.0), tear: float = 0.0) -> Callable[[Scene], Struck]:
    def change(scene: Scene) -> Struck:
        _network(scene).weather(delay_s=delay_s, tear=tear)
        time.sleep(scene.random.uniform(1, 3))
        _network(scene).weather()
        return Struck(role="network")

    return change


def _port_scan(scene: Scene) -> Struck:
    for port in sorted(listening_ports(scene.stage.pid)):
        for _ in range(SCANS):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                pass
    return Struck(role="port scan")


# -- disk and clock -----------------------------------------------------------------------------------------------------
def _full_disk(scene: Scene) -> Struck:
    """Limit file sizes: the learner's to a little more than the journal's size, the supervisor's to what they are."""
    journal = scene.stage.config.run_folder / "trained.jsonl"
    size = journal.stat().st_size + scene.random.randrange(400) if journal.exists() else 0
    _limit_files(scene.stage.pids("learner"), size)
    _limit_files([scene.stage.pid], 0)
    time.sleep(scene.random.uniform(0.5, 2))
    _limit_files([scene.stage.pid, *descendants(scene.stage.pid)], resource.RLIM_INFINITY)  # the limit is inherited
    return Struck(role="disk")


def _limit_files(pids: list[int], size: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (min(size, hard) if hard >= 0 else size, hard))


def _damaged_checkpoint(scene: Scene) -> Struck:
    """Truncate the newest checkpoint, then kill the learner."""
    found = candidates(scene.stage.config.run_folder / "checkpoints")
    if len(found) > 1:
        file = next(path for path in sorted(found[0].iterdir()) if path.suffix == ".safetensors")
        _cut(file)
    _signal_one(scene, "learner", signal.SIGKILL)
    return Struck(role="learner (damage)", steps=ALL_NEW, ends_learner=True)


def _cut(file: Path) -> None:
    with suppress(OSError):
        os.truncate(file, file.stat().st_size // 2)


def _empty_server(scene: Scene) -> Struck:
    assert scene.server is not None
    scene.server.kill()
    scene.server.empty()
    scene.server.start()
    return Struck(role="server (emptied)", steps=ALL_NEW, ends_learner=True)


def _set_back_clock(scene: Scene) -> Struck:
    """Set back the clock of the server and empty it: its stream positions and leases then start from an earlier time."""
    assert scene.server is not None
    scene.server.set_clock_back(DAY_S)
    return _empty_server(scene)


_FAULTS: Mapping[str, Callable[[Scene], Struck]] = {
    "kill_learner": _kill_learner,
    "kill_worker": _kill_worker,
    "kill_server": _kill_server,
    "kill_keeper": _kill_keeper,
    "kill_supervisor": _kill_supervisor,
    "pause_learner": _paused("learner", (0.5, 5)),
    "pause_worker": _paused("worker", (0.5, 5)),
    "pause_server": _paused("server", (0.5, 3)),
    "reset_network": _reset_network,
    "cut_network": _cut_network,
    "slow_network": _bad_weather(delay_s=(0.0, 0.2)),
    "torn_network": _bad_weather(tear=0.05),
    "port_scan": _port_scan,
    "full_disk": _full_disk,
    "damaged_checkpoint": _damaged_checkpoint,
    "empty_server": _empty_server,
    "set_back_clock": _set_back_clock,
}
