"""Supervises the processes of a run, wherever they are, and ends them in order.

buffer serve ◀── worker 0 … n        when the learner ends, workers are stopped,
      ▲────────── learner            then the buffer
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from async_rl.durable.best_effort import report_write_error
from async_rl.durable.whole_file import write_whole
from async_rl.recording.process_events import ProcessEvents
from async_rl.supervision import FatalExit, Restarted, exit_code_of, how_it_ended

log = structlog.get_logger("async_rl.run")

LOG_TAIL = 30

Start = Callable[[Callable[[str, int], None], Callable[[str, int, int], None]], Restarted]
"""Makes a process, given a function for its start (name, process id) and one for its end (and exit code)."""


class RunSupervisor:
    """Supervises the processes of a run until the learner ends, a required process fails, or `stop` is set.

    waits for:    the learner to finish; a process that must not be restarted any more
    unblocked by: exit of child processes; `stop` (SIGTERM, Ctrl-C)
    """

    def __init__(self, starts: Mapping[str, Start], folder: Path, events_bytes: int = 0) -> None:
        """`starts`: the processes by name. `events_bytes`: limit of the run's recorded events; 0: none are recorded."""
        self._folder, self._starts = folder, dict(starts)
        self._events = ProcessEvents(folder, events_bytes=events_bytes, warn=log.warning)
        self._pids: dict[str, int] = {}
        self._children = {name: self._started(name) for name in starts}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._ended: set[str] = set()
        self._left_out: dict[str, FatalExit] = {}
        self._over = asyncio.Event()
        self._broken: FatalExit | None = None
        self._learner_status = 0

    async def run(self, stop: asyncio.Event) -> int:
        async with asyncio.TaskGroup() as self._tasks:
            for name in self._children:
                self._running[name] = self._tasks.create_task(self._keep(name), name=name)
            stopping = self._tasks.create_task(self._end_on(stop))
            await self._over.wait()
            stopping.cancel()
            await self._end()
        self._events.close()
        if self._broken is not None:
            return self._explain(self._broken)
        return exit_code_of(self._learner_status)

    @property
    def children(self) -> Mapping[str, Restarted]:
        """The processes by name, without those that have ended for good."""
        return {name: child for name, child in self._children.items() if name not in self._ended}

    @property
    def left_out(self) -> Mapping[str, FatalExit]:
        """Processes without which the run goes on, and how they ended; some are tried again."""
        return self._left_out

    def add(self, name: str, start: Start) -> None:
        """Start another process while the run goes on."""
        if not self._over.is_set():
            self._starts[name] = start
            self._children[name] = self._started(name)
            self._ended.discard(name)
            self._running[name] = self._tasks.create_task(self._keep(name), name=name)

    async def remove(self, name: str) -> None:
        """Let a process drain, and forget it. The run goes on without it."""
        running = self._running[name]
        await self._terminate(self._children[name], running)
        await asyncio.wait([running])
        del self._children[name], self._running[name]
        self._ended.discard(name)

    async def _keep(self, name: str) -> None:
        """Keep a process going until it ends well, is asked to end, or fails in a way that ends the run."""
        while not self._over.is_set():
            try:
                status = await self._children[name].supervise()
            except FatalExit as fatal:
                if not self._goes_on_without(name):  # the others drain, so that the learner writes a checkpoint
                    self._broken = self._broken if self._broken is not None else fatal
                    self._over.set()
                elif not await self._stays_left_out(fatal):
                    self._children[name] = self._started(name)
                    continue
            else:
                if name == "learner":
                    self._learner_status = status
                    self._over.set()
            self._ended.add(name)
            return

    def _goes_on_without(self, name: str) -> bool:
        """Whether the run can continue without this process: an evaluator, or a worker if there are others."""
        if name in ("learner", "buffer"):
            return False
        workers = self._workers
        return name not in workers or bool(workers - self._ended - self._left_out.keys() - {name})

    @property
    def _workers(self) -> set[str]:
        return {name for name in self._children if name.startswith("worker-")}

    async def _stays_left_out(self, fatal: FatalExit) -> bool:
        """Wait before the next attempt: for `window_s`, or for ever if a restart would not help. True: it was asked to end."""
        name, again_s = fatal.spec.name, fatal.spec.policy.window_s
        again = f" and tries again in {again_s:g} s" if fatal.is_tried_again else ""
        log.warning(f"{fatal}; the run continues without it{again}", **self._last_words(name))
        self._left_out[name] = fatal
        try:
            return await self._children[name].drains_within(again_s if fatal.is_tried_again else None)
        finally:
            del self._left_out[name]

    def _last_words(self, name: str) -> dict[str, str]:
        return {"its_last_line": lines[-1]} if (lines := self._children[name].last_lines(1)) else {}

    async def _end_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        log.info("draining; press Ctrl-C again to end everything at once")
        self._over.set()

    async def _end(self) -> None:
        """End all processes, the buffer last: the others still return tickets and write the last checkpoint."""
        async with asyncio.TaskGroup() as ending:
            for name, child in self._children.items():
                if name != "buffer":
                    ending.create_task(self._terminate(child, self._running[name]), name=f"end of {name}")
        if "buffer" in self._children:
            await self._terminate(self._children["buffer"], self._running["buffer"])

    async def _terminate(self, child: Restarted, running: asyncio.Task[None]) -> None:
        child.terminate()
        if (await asyncio.wait([running], timeout=child.spec.grace_s))[1]:
            log.warning(f"{child.spec.name} did not drain within {child.spec.grace_s:g} s, killing it")
            child.kill()

    def _started(self, name: str) -> Restarted:
        return self._starts[name](self._note, self._note_end)

    def _note_end(self, name: str, pid: int, status: int) -> None:
        self._events.ended(name, pid, was_asked=status == 0 or self._over.is_set(), detail=how_it_ended(status))

    def _note(self, name: str, pid: int) -> None:
        self._events.started(name, pid)
        self._pids[name] = pid
        path = self._folder / "processes.json"
        with report_write_error(path, log.warning):  # informational: the run continues without it
            write_whole(path, json.dumps(self._pids, indent=2) + "\n")

    def _explain(self, fatal: FatalExit) -> int:
        name = fatal.spec.name
        if tail := self._children[name].last_lines(LOG_TAIL):
            print(f"The last lines of {fatal.spec.log}:", file=sys.stderr)
            print("\n".join(f"  {line}" for line in tail), file=sys.stderr)
        others = "; no other worker is left" if name in self._workers and len(self._workers) > 1 else ""
        print(f"async-rl: {fatal}{others}", file=sys.stderr)
        return fatal.exit_code
