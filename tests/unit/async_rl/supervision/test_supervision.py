"""Services, restarts, drains and stalls, with real processes and signals."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from async_rl.durable import failpoints
from async_rl.errors import CheckpointError, ConfigError, EnvironmentBlocked, RestartLimit, ServiceStopped, find_async_rl_error
from async_rl.launch.local import children
from async_rl.launch.run_supervisor import RunSupervisor
from async_rl.launch.slurm.scripts import CONTINUES
from async_rl.supervision import (
    Child,
    ChildSpec,
    FatalExit,
    LoopStall,
    RestartPolicy,
    ServiceThread,
    run_with,
    stall_watchdog,
)
from async_rl.supervision.processes.restarts import FATAL_EXIT_CODES, Finish, GiveUp, Restart, decide
from tests.support.waiting import PATIENCE_S

QUICK = RestartPolicy(limit=2, window_s=60, backoff_s=0.01)


# -- services -------------------------------------------------------------------------------------------------------


async def test_services_run_beside_and_end_with_the_work() -> None:
    running, ended = asyncio.Event(), asyncio.Event()

    async def service() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def work() -> str:
        await running.wait()
        return "done"

    assert await run_with(work, beside=service) == "done"
    assert ended.is_set()


async def never() -> None:
    await asyncio.Event().wait()


async def test_a_service_that_ends_first_is_a_failure_that_names_it() -> None:
    async def ends() -> None:
        pass

    with pytest.raises(ExceptionGroup) as caught:
        await run_with(never, heart=ends)
    assert isinstance(found := find_async_rl_error(caught.value), ServiceStopped)
    assert "'heart'" in str(found)


@pytest.mark.parametrize("who", ["main", "service"])
async def test_no_exception_is_lost(who: str) -> None:
    async def breaks() -> None:
        raise ValueError("broken")

    with pytest.raises(ExceptionGroup) as caught:
        await (run_with(breaks, beside=never) if who == "main" else run_with(never, beside=breaks))
    assert [type(error) for error in caught.value.exceptions] == [ValueError]


async def test_cancelling_reaches_the_services() -> None:
    ended = asyncio.Event()
    started = asyncio.Event()

    async def service() -> None:
        started.set()
        try:
            await never()
        finally:
            ended.set()

    task = asyncio.create_task(run_with(never, beside=service))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


# -- restarts: the decision -----------------------------------------------------------------------------------------


def test_what_happens_after_an_exit() -> None:
    policy = RestartPolicy(limit=3, window_s=100, backoff_s=1)
    assert decide(0, restarts=[], now=0, policy=policy) == Finish()
    assert decide(1, restarts=[], now=0, policy=policy) == Restart(after_s=1)
    assert decide(-9, restarts=[10, 20], now=30, policy=policy) == Restart(after_s=4)
    assert decide(-9, restarts=[-200, -190, -180], now=0, policy=policy) == Restart(after_s=1)
    gave_up = decide(1, restarts=[10, 20, 30], now=40, policy=policy)
    assert isinstance(gave_up, GiveUp)
    assert gave_up.exit_code == RestartLimit.exit_code


@pytest.mark.parametrize("code", sorted(FATAL_EXIT_CODES))
def test_some_exits_are_final(code: int) -> None:
    decision = decide(code, restarts=[], now=0, policy=QUICK)
    assert isinstance(decision, GiveUp)
    assert decision.exit_code == code


def test_a_process_that_was_lost_with_its_machine_does_not_use_up_its_restarts() -> None:
    decision = decide(-9, restarts=[10, 20, 30], now=40, policy=RestartPolicy(limit=3), lost_machine=True)
    assert decision == Restart(after_s=0.5, counts=False)


def test_a_worker_whose_environment_blocked_it_is_replaced_at_once_and_does_not_use_up_its_restarts() -> None:
    decision = decide(EnvironmentBlocked.exit_code, restarts=[10, 20, 30], now=40, policy=RestartPolicy(limit=3))
    assert decision == Restart(after_s=0.0, counts=False)


# -- child processes ------------------------------------------------------------------------------------------------


def child_spec(script: str, folder: Path, name: str = "child", *args: str) -> ChildSpec:
    return ChildSpec(
        name=name,
        command=[sys.executable, "-c", script, str(folder), *args],
        environment=dict(os.environ),
        log=folder / f"{name}.log",
        policy=QUICK,
    )


COUNTED = """\
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
count = len(list(folder.glob("start-*")))
(folder / f"start-{count}").touch()
"""


async def test_a_crashed_child_is_started_again(tmp_path: Path) -> None:
    started: list[str] = []
    crash_once = COUNTED + "sys.exit(0 if count else 1)"
    child = Child(child_spec(crash_once, tmp_path), on_start=lambda name, pid: started.append(name))
    assert await child.supervise() == 0
    assert started == ["child", "child"]


async def test_a_child_that_keeps_crashing_is_given_up(tmp_path: Path) -> None:
    child = Child(child_spec(COUNTED + "print('reason', count); sys.exit(1)", tmp_path), on_start=lambda *_: None)
    with pytest.raises(FatalExit, match="child exited with code 1, after 2 restarts") as caught:
        await child.supervise()
    assert caught.value.exit_code == RestartLimit.exit_code
    assert child.last_lines(2) == ["reason 1", "reason 2"]


async def test_a_child_that_has_just_ended_keeps_its_exit_code_when_it_is_asked_to_end(tmp_path: Path) -> None:
    started, codes = asyncio.Event(), list[int]()

    def on_start(_: str, pid: int) -> None:
        nonlocal process
        process = pid
        started.set()

    process = 0
    spec = child_spec("import sys; sys.exit(7)", tmp_path)
    child = Child(spec, on_start=on_start, on_end=lambda _name, _pid, code: codes.append(code))
    running = asyncio.create_task(child.supervise())
    await started.wait()
    with suppress(ChildProcessError):  # asyncio's thread was faster
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222  # the event loop must not hear of the end
    child.terminate()
    await running
    assert codes == [7]


async def test_a_final_exit_code_is_not_tried_again(tmp_path: Path) -> None:
    child = Child(child_spec(COUNTED + f"sys.exit({ConfigError.exit_code})", tmp_path), on_start=lambda *_: None)
    with pytest.raises(FatalExit, match="which no restart would change"):
        await child.supervise()
    assert len(list(tmp_path.glob("start-*"))) == 1


FALLS_SILENT = (
    COUNTED
    + """\
import os, signal
from async_rl.supervision import signs_of_life
with signs_of_life(os.environ):
    if count == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
"""
)


async def test_a_child_that_shows_no_sign_of_life_is_killed_and_started_again(tmp_path: Path) -> None:
    spec = child_spec(FALLS_SILENT, tmp_path)
    spec = replace(spec, policy=replace(QUICK, silence_s=10.0))
    assert await Child(spec, on_start=lambda *_: None).supervise() == 0
    assert len(list(tmp_path.glob("start-*"))) == 2


WAITS_FOR_SIGTERM = """\
import pathlib, signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("ready", flush=True)
signal.sigwait([signal.SIGTERM])
(pathlib.Path(sys.argv[1]) / (sys.argv[2] + "-ended")).write_text(str(time.monotonic_ns()))
"""


async def until(condition: Callable[[], bool]) -> None:
    """Files and processes have no event to wait on."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def says_ready(folder: Path, name: str) -> Callable[[], bool]:
    return lambda: (folder / f"{name}.log").exists() and "ready" in (folder / f"{name}.log").read_text()


async def test_a_child_asked_to_drain_is_not_started_again(tmp_path: Path) -> None:
    child = Child(child_spec(WAITS_FOR_SIGTERM, tmp_path, "child", "child"), on_start=lambda *_: None)
    async with asyncio.TaskGroup() as tasks:
        supervising = tasks.create_task(child.supervise())
        await until(says_ready(tmp_path, "child"))
        child.terminate()
    assert supervising.result() == 0
    assert (tmp_path / "child-ended").exists()


DRAINS_UNTIL_A_FILE = """\
import asyncio, pathlib, sys
from async_rl.supervision import drain_on_signals
async def main():
    stop = drain_on_signals()
    print("ready", flush=True)
    await stop.wait()
    print("draining", flush=True)
    while not (pathlib.Path(sys.argv[1]) / "go").exists():
        await asyncio.sleep(0.01)
    print("saved", flush=True)
asyncio.run(main())
"""


async def test_a_child_that_drains_is_asked_once_however_often_its_supervisor_is(tmp_path: Path) -> None:
    child = Child(child_spec(DRAINS_UNTIL_A_FILE, tmp_path), on_start=lambda *_: None)
    async with asyncio.TaskGroup() as tasks:
        supervising = tasks.create_task(child.supervise())
        await until(says_ready(tmp_path, "child"))
        child.terminate()
        await until(lambda: child.last_lines(1) == ["draining"])
        child.terminate()  # as a cluster that says every few seconds that it will take the machine away
        (tmp_path / "go").touch()
    assert supervising.result() == 0
    assert child.last_lines(1) == ["saved"]


SLURM_MEMBER = """\
import asyncio, os, pathlib, sys
from async_rl.launch.slurm.member import SlurmMember
from async_rl.supervision import Child, ChildSpec
folder = pathlib.Path(sys.argv[1])
spec = ChildSpec(name="child", command=[sys.executable, "-c", sys.argv[2], str(folder)], environment=dict(os.environ),
                 log=folder / "child.log")
class Told(Child):
    def terminate(self):
        super().terminate()
        print("told", flush=True)
sys.exit(asyncio.run(SlurmMember(Told(spec, on_start=lambda *_: None), None).run(leaves=False)))
"""


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ((signal.SIGUSR1, signal.SIGTERM), 0),
        ((signal.SIGTERM, signal.SIGTERM), 0),
        ((signal.SIGUSR1, signal.SIGUSR1), CONTINUES),
    ],
)
async def test_a_process_in_a_slurm_job_drains_although_its_job_is_told_twice(
    tmp_path: Path, signals: tuple[signal.Signals, signal.Signals], code: int
) -> None:
    """Near its time limit and by `fleet stop`, or by `fleet stop` typed again."""
    line = [sys.executable, "-c", SLURM_MEMBER, str(tmp_path), DRAINS_UNTIL_A_FILE]
    member = await asyncio.create_subprocess_exec(*line, stdout=asyncio.subprocess.PIPE)
    assert member.stdout is not None
    try:
        await until(says_ready(tmp_path, "child"))
        for each in signals:
            member.send_signal(each)
            assert await member.stdout.readline() == b"told\n"
            await until(lambda: "draining" in (tmp_path / "child.log").read_text())
        (tmp_path / "go").touch()
        assert await member.wait() == code
    finally:
        if member.returncode is None:
            member.kill()
    assert "saved" in (tmp_path / "child.log").read_text()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_cancelling_kills_the_child_and_what_it_started(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time\n"
        "below = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print('ready', below.pid, flush=True)\ntime.sleep(600)"
    )
    pids: list[int] = []
    child = Child(child_spec(script, tmp_path), on_start=lambda _, pid: pids.append(pid))
    supervising = asyncio.create_task(child.supervise())
    await until(says_ready(tmp_path, "child"))
    pids.append(int(child.last_lines(1)[0].split()[1]))
    supervising.cancel()
    with pytest.raises(asyncio.CancelledError):
        await supervising
    assert not Path(f"/proc/{pids[0]}").exists(), "its end was waited for"
    await until(lambda: not any(is_alive(pid) for pid in pids))


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
async def test_children_die_with_their_supervisor(tmp_path: Path) -> None:
    supervisor = """\
import asyncio, os, pathlib, sys
from async_rl.supervision import Child, ChildSpec
folder = pathlib.Path(sys.argv[1])
sleeps = "import os, time; print('ready', os.getpid(), flush=True); time.sleep(600)"
spec = ChildSpec(name="child", command=[sys.executable, "-c", sleeps], environment=dict(os.environ), log=folder / "child.log")
asyncio.run(Child(spec, on_start=lambda *_: None).supervise())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", supervisor, str(tmp_path))
    try:
        await until(says_ready(tmp_path, "child"))
    finally:
        process.kill()
        await process.wait()
    pid = int((tmp_path / "child.log").read_text().split()[1])
    await until(lambda: not is_alive(pid))


# -- a run of several processes -------------------------------------------------------------------------------------

WAITS_FOR_A_FILE = """\
import pathlib, sys, time
while not (pathlib.Path(sys.argv[1]) / "go").exists():
    time.sleep(0.01)
"""


def roles(folder: Path, learner: str) -> list[ChildSpec]:
    return [
        child_spec(WAITS_FOR_SIGTERM, folder, "buffer", "buffer"),
        child_spec(learner, folder, "learner", "learner"),
        child_spec(WAITS_FOR_SIGTERM, folder, "worker-0", "worker-0"),
    ]


@asynccontextmanager
async def local_run(specs: list[ChildSpec], folder: Path, stop: asyncio.Event) -> AsyncIterator[asyncio.Task[int]]:
    async with asyncio.TaskGroup() as tasks:
        yield tasks.create_task(RunSupervisor(children(specs), folder).run(stop))


async def all_ready(folder: Path, *names: str) -> None:
    for name in names:
        await until(says_ready(folder, name))


async def test_the_run_ends_with_its_learner_and_the_buffer_goes_last(tmp_path: Path) -> None:
    async with local_run(roles(tmp_path, WAITS_FOR_A_FILE), tmp_path, asyncio.Event()) as running:
        await all_ready(tmp_path, "buffer", "worker-0")
        (tmp_path / "go").touch()
    assert running.result() == 0
    worker, buffer = (int((tmp_path / f"{name}-ended").read_text()) for name in ("worker-0", "buffer"))
    assert worker < buffer


async def test_a_signal_drains_everything(tmp_path: Path) -> None:
    stop = asyncio.Event()
    async with local_run(roles(tmp_path, WAITS_FOR_SIGTERM), tmp_path, stop) as running:
        await all_ready(tmp_path, "buffer", "learner", "worker-0")
        stop.set()
    assert running.result() == 0
    assert {path.name for path in tmp_path.glob("*-ended")} == {"buffer-ended", "learner-ended", "worker-0-ended"}


async def test_a_worker_that_cannot_run_ends_the_run_with_its_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *others, _ = roles(tmp_path, WAITS_FOR_SIGTERM)
    misfit = child_spec(WAITS_FOR_A_FILE + "print('the model differs'); sys.exit(5)", tmp_path, "worker-0")
    async with local_run([*others, misfit], tmp_path, asyncio.Event()) as running:
        await all_ready(tmp_path, "buffer", "learner")
        (tmp_path / "go").touch()
    assert running.result() == 5
    said = capsys.readouterr().err
    assert "the model differs" in said
    assert "worker-0 exited with code 5" in said
    assert (tmp_path / "learner-ended").exists(), "the learner must be given the time to save what it learned"


async def test_a_worker_that_keeps_dying_is_left_out_while_another_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    dies = child_spec(COUNTED + "print('no such GPU'); sys.exit(1)", tmp_path, "worker-1")
    async with local_run([*roles(tmp_path, WAITS_FOR_A_FILE), dies], tmp_path, asyncio.Event()) as running:
        await until(lambda: len(list(tmp_path.glob("start-*"))) == 1 + QUICK.limit)
        await all_ready(tmp_path, "buffer", "worker-0")
        await until(lambda: "the run continues without it" in caplog.text + (said := capsys.readouterr()).out + said.err)
        assert not running.done()
        (tmp_path / "go").touch()
    assert running.result() == 0
    assert (tmp_path / "worker-0-ended").exists()


async def test_a_worker_that_was_left_out_is_tried_again(tmp_path: Path) -> None:
    dies_thrice = child_spec(COUNTED + "sys.exit(1) if count < 3 else __import__('time').sleep(600)", tmp_path, "worker-1")
    dies_thrice = replace(dies_thrice, policy=replace(QUICK, window_s=0.5))
    async with local_run([*roles(tmp_path, WAITS_FOR_A_FILE), dies_thrice], tmp_path, asyncio.Event()) as running:
        await until(lambda: len(list(tmp_path.glob("start-*"))) == 4)
        (tmp_path / "go").touch()
    assert running.result() == 0


async def test_a_worker_that_was_left_out_can_be_removed_and_replaced_and_the_run_ends_as_ever(tmp_path: Path) -> None:
    starts = children(roles(tmp_path, WAITS_FOR_A_FILE))
    dies = child_spec(COUNTED + "sys.exit(1)", tmp_path, "worker-1")
    supervisor = RunSupervisor(starts | children([dies]), tmp_path)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(supervisor.run(asyncio.Event()))
        await all_ready(tmp_path, "buffer", "worker-0")
        await until(lambda: "worker-1" in supervisor.left_out)

        await supervisor.remove("worker-1")
        assert "worker-1" not in supervisor.children
        assert not supervisor.left_out

        for name in ("worker-1", "worker-2"):
            new = child_spec(WAITS_FOR_SIGTERM, tmp_path, name, name)
            supervisor.add(name, children([new])[name])
        await all_ready(tmp_path, "worker-1", "worker-2")
        await supervisor.remove("worker-2")
        assert (tmp_path / "worker-2-ended").exists(), "it had the time to drain"
        assert set(supervisor.children) == {"buffer", "learner", "worker-0", "worker-1"}
        (tmp_path / "go").touch()
    assert running.result() == 0
    assert {path.name for path in tmp_path.glob("*-ended")} == {f"{name}-ended" for name in ENDED}
    assert len(list(tmp_path.glob("start-*"))) == 1 + QUICK.limit, "what was removed is not tried again"


ENDED = ("buffer", "worker-0", "worker-1", "worker-2")


async def test_a_worker_that_is_removed_while_the_run_ends_drains_once(tmp_path: Path) -> None:
    stop = asyncio.Event()
    *others, _ = roles(tmp_path, WAITS_FOR_SIGTERM)
    supervisor = RunSupervisor(children([*others, child_spec(DRAINS_UNTIL_A_FILE, tmp_path, "worker-0")]), tmp_path)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(supervisor.run(stop))
        await all_ready(tmp_path, "buffer", "learner", "worker-0")
        removing = tasks.create_task(supervisor.remove("worker-0"))
        await until(lambda: "draining" in (tmp_path / "worker-0.log").read_text())
        stop.set()
        await until(lambda: (tmp_path / "learner-ended").exists())
        (tmp_path / "go").touch()
        await removing
    assert running.result() == 0
    assert "saved" in (tmp_path / "worker-0.log").read_text()


async def test_a_learner_that_fails_after_workers_were_removed_is_not_said_to_be_the_last_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = WAITS_FOR_A_FILE + f"sys.exit({CheckpointError.exit_code})"
    more = child_spec(WAITS_FOR_SIGTERM, tmp_path, "worker-1", "worker-1")
    supervisor = RunSupervisor(children([*roles(tmp_path, fails), more]), tmp_path)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(supervisor.run(asyncio.Event()))
        await all_ready(tmp_path, "buffer", "worker-0", "worker-1")
        await supervisor.remove("worker-1")
        (tmp_path / "go").touch()
    assert running.result() == CheckpointError.exit_code
    assert "no other worker" not in capsys.readouterr().err


async def test_the_run_ends_when_no_worker_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    buffer, learner, _ = roles(tmp_path, WAITS_FOR_SIGTERM)
    dying = [child_spec("print('no such GPU'); raise SystemExit(1)", tmp_path, name) for name in ("worker-0", "worker-1")]
    async with local_run([buffer, learner, *dying], tmp_path, asyncio.Event()) as running:
        pass
    assert running.result() == RestartLimit.exit_code
    said = capsys.readouterr().err
    assert "no such GPU" in said
    assert "exited with code 1, after 2 restarts within 60 s; no other worker is left" in said


async def test_a_killed_worker_returns_under_another_pid(tmp_path: Path) -> None:
    def worker_pid() -> int | None:
        path = tmp_path / "processes.json"
        return json.loads(path.read_text()).get("worker-0") if path.exists() else None

    stop = asyncio.Event()
    async with local_run(roles(tmp_path, WAITS_FOR_SIGTERM), tmp_path, stop) as running:
        await all_ready(tmp_path, "buffer", "learner", "worker-0")
        await until(lambda: worker_pid() is not None)  # a child may be ready before its supervisor has written it down
        before = worker_pid()
        assert before is not None
        os.kill(before, signal.SIGKILL)
        await until(lambda: worker_pid() != before and (tmp_path / "worker-0.log").read_text().count("ready") == 2)
        stop.set()
    assert running.result() == 0


# -- signals and stalls ---------------------------------------------------------------------------------------------

DRAINS = """\
import asyncio, ctypes, signal, sys, threading, time
from async_rl.supervision import drain_on_signals
def signalled():
    time.sleep(0.2)  # the loop sleeps
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
async def main():
    stop = drain_on_signals()
    print("ready", flush=True)
    if sys.argv[1] == "signalled in another thread":
        threading.Thread(target=signalled).start()
    await stop.wait()
    print("draining", flush=True)
    if sys.argv[1] == "stuck":
        time.sleep(600)
    if sys.argv[1] == "stuck with the interpreter's lock":
        ctypes.PyDLL(None).sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(number: signal.Signals) -> None:
    with drainer("quick") as process:
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0


def test_a_signal_that_does_not_interrupt_the_sleeping_loop_wakes_it() -> None:
    with drainer("signalled in another thread") as process:
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("how", ["stuck", "stuck with the interpreter's lock"])
def test_the_second_signal_ends_even_a_stuck_process(how: str) -> None:
    with drainer(how) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == b"draining\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == -signal.SIGTERM


@contextmanager
def drainer(how: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", DRAINS, how], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


DIES = """\
import threading, time
from async_rl.supervision import ServiceThread
def work(thread):
    {what}
ServiceThread(work, name="errands").start()
threading.Event().wait(60)
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raise KeyError('layout')", "the thread 'errands' must run for as long as its process, but KeyError: 'layout'"),
        ("raise SystemExit(0)", "the thread 'errands' must run for as long as its process, but SystemExit: 0"),
        ("pass", "the thread 'errands' must run for as long as its process, but it returned"),
    ],
)
def test_a_thread_that_dies_ends_its_process_with_its_name(what: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DIES.format(what=what)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == ServiceStopped.exit_code
    assert said in done.stderr.splitlines()[-1]


OUT_OF_DESCRIPTORS = """
import os, resource, time
from async_rl.supervision.processes.descriptors import descriptors_are_scarce, enough_descriptors

with enough_descriptors(within_s=2):
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    try:
        while True:
            os.dup(2)
    except OSError:
        print(descriptors_are_scarce(), flush=True)
    time.sleep(30)
"""


def test_a_process_without_free_descriptors_ends_with_a_sentence_that_names_the_limit() -> None:
    line = [sys.executable, "-c", OUT_OF_DESCRIPTORS]
    done = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.stdout == "True\n", "the wire builds its groups anew, which frees some"
    assert done.returncode == ServiceStopped.exit_code
    assert "40 file descriptors are too few for this process (none was free for 2 s); raise the system's limit" in done.stderr


LINKS_THAT_FAIL = """\
import errno, os, threading
from async_rl.supervision.processes.descriptors import many_descriptors
meeting = threading.Barrier({at_once})
def fail():
    try:
        with many_descriptors():
            meeting.wait(30)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    except OSError:
        pass
for _ in range({times}):
    links = [threading.Thread(target=fail) for _ in range({at_once})]
    [link.start() for link in links]
    [link.join() for link in links]
"""


@pytest.mark.parametrize(("at_once", "times", "ends"), [(8, 1, False), (2, 2, False), (1, 3, True), (3, 3, True)])
def test_links_that_fail_together_for_want_of_descriptors_are_one_failure(at_once: int, times: int, ends: bool) -> None:
    line = [sys.executable, "-c", LINKS_THAT_FAIL.format(at_once=at_once, times=times)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == (ServiceStopped.exit_code if ends else 0), done.stderr


@pytest.mark.parametrize("role", ["learner", "rollout_workers"])
def test_a_process_that_may_not_have_enough_descriptors_says_so_before_it_starts(role: str) -> None:
    line = ["bash", "-c", f"ulimit -n 100; exec {sys.executable} -P -m {role} @ configs/quickstart.yaml"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == ConfigError.exit_code
    assert "100 file descriptors are too few for a process of a run, which needs 256; raise the system's" in done.stderr


HANGS = """\
import os, signal, threading, time
from async_rl.supervision import work_limit, working

@working("an errand")
def errand(seconds):
    for _ in range(round(seconds * 10)): time.sleep(0.1)

def work():
    {before}
    print("begins", flush=True)
    errand({seconds})
    print("is done", flush=True)

with work_limit({limit_s}):
    thread = threading.Thread(target=work, name="errands", daemon=True)
    thread.start()
    thread.join(60)
    time.sleep(1)
"""


def test_work_that_hangs_ends_its_process_with_the_name_of_the_thread_and_the_line() -> None:
    done = hanging(seconds=600, limit_s=0.05)
    assert done.returncode == ServiceStopped.exit_code
    *stacks, last = done.stderr.splitlines()
    said = r"the thread 'errands' has worked on an errand for \d s without finishing, at <string>:6 in errand"
    assert re.search(said, last), last
    assert any("line 6 in errand" in line for line in stacks)


@pytest.mark.parametrize(
    "how",
    [
        {"seconds": 1, "limit_s": 0},
        {"seconds": 0.1, "limit_s": 30},
        {"seconds": 2, "limit_s": 0.9},  # the first time, which may compile
        {"seconds": 1, "limit_s": 0.05, "before": "[errand(0) for _ in range(3)]; time.sleep(1)", "ends": True},
    ],
)
def test_work_within_its_limit_is_left_alone_and_the_first_of_its_kind_gets_more(how: dict[str, Any]) -> None:
    ends = how.pop("ends", False)
    done = hanging(**how)
    assert done.returncode == (ServiceStopped.exit_code if ends else 0), done.stderr
    assert ("is done" in done.stdout) is not ends


def test_time_in_which_the_process_did_not_run_does_not_count_as_work() -> None:
    """As after a suspended laptop: only a few seconds of the pause count."""
    line = [sys.executable, "-c", HANGS.format(before="errand(0)", seconds=3, limit_s=12.0)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(13)  # longer than the limit
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "is done\n"
        assert process.wait(PATIENCE_S) == 0


def hanging(*, seconds: float, limit_s: float, before: str = "pass") -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", HANGS.format(before=before, seconds=seconds, limit_s=limit_s)]
    return subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_a_thread_that_is_told_to_stop_may_end() -> None:
    failures: list[object] = []
    thread = ServiceThread(lambda thread: thread.pause(60), name="errands", on_failure=failures.append).start()
    thread.stop()
    assert thread.join(PATIENCE_S)
    assert failures == []


async def test_a_blocked_loop_is_told_with_the_line_that_blocks_it() -> None:
    told: list[LoopStall] = []
    with tempfile.TemporaryFile("w+") as file, stall_watchdog(0.1, file, on_stall=told.append):
        await asyncio.create_task(blocks(told), name="an episode")
    assert [stall.place.function for stall in told if stall.place is not None] == ["blocking_call_in_a_coroutine"]
    assert [stall.task.get_name() for stall in told if stall.task is not None] == ["an episode"]


async def blocks(until: list[LoopStall]) -> None:
    blocking_call_in_a_coroutine(lambda: until)


async def test_a_stuck_loop_is_shown_where_it_is_stuck() -> None:
    with tempfile.TemporaryFile("w+") as file:
        with stall_watchdog(0.1, file):
            blocking_call_in_a_coroutine(lambda: os.fstat(file.fileno()).st_size)
            await asyncio.sleep(0)
        file.seek(0)
        assert "blocking_call_in_a_coroutine" in file.read()


def blocking_call_in_a_coroutine(until: Callable[[], object]) -> None:
    """Block until there is something, however long the watchdog takes to look."""
    while not until():
        time.sleep(0.05)


async def test_a_loop_that_turns_is_left_alone() -> None:
    said = io.StringIO()
    with stall_watchdog(5.0, said):
        for _ in range(10):
            await asyncio.sleep(0.01)
    assert said.getvalue() == ""


FORKS = """
import os, threading
from async_rl.supervision.liveness.watchdog import watched

with watched(lambda: None, every_s=0.01):
    if os.fork() == 0:
        called = threading.Event()
        with watched(called.set, every_s=0.01):
            os._exit(0 if called.wait(30) else 1)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_fork_is_watched_for_itself() -> None:
    line = [sys.executable, "-W", "ignore", "-c", FORKS]
    assert subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout == "0\n"


# -- disks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
async def test_a_run_goes_on_where_its_supervisor_cannot_write(tmp_path: Path, error: str) -> None:
    """Neither the list of its processes, nor the log of one."""
    (tmp_path / "logs").write_text("a file where a folder should be")
    learner = ChildSpec(
        name="learner", command=[sys.executable, "-c", "print('said')"], environment={}, log=tmp_path / "logs" / "learner.log"
    )
    failpoints.arm(f"whole_file.writing:1-9={error}")
    try:
        with structlog.testing.capture_logs() as said:
            assert await RunSupervisor(children([learner]), tmp_path).run(asyncio.Event()) == 0
    finally:
        failpoints.arm("")
    assert [
        next((part for part in ("learner.log cannot be written", "processes.json is not written") if part in line["event"]), "")
        for line in said
    ] == ["learner.log cannot be written", "processes.json is not written"]
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_a_program_whose_words_find_no_room_keeps_its_exit_code() -> None:
    script = """
from async_rl.errors import CheckpointError, boundary
from async_rl.supervision.liveness.leaving import leave_at_once
with leave_at_once(), boundary("test"):
    raise CheckpointError("the disk is full")
"""
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([sys.executable, "-c", script], stdout=full, stderr=full, timeout=PATIENCE_S, check=False)
    assert ended.returncode == CheckpointError.exit_code
