"""One thread for everything that one episode does to a blocking library."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from async_rl.supervision.liveness.daemon_thread import as_exception

T = TypeVar("T")


class EpisodeThread:
    """Works in the order of the calls; some simulators stay with the thread that made them.

    A deadline leaves a call that hangs behind, and the thread does not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        Thread(target=self._work, name=name, daemon=True).start()

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._add(work))

    def finish(self, work: Callable[[], object]) -> None:
        """The last thing to do, once all that was begun has ended. Nobody waits for it."""
        self._add(work)
        self._jobs.put(None)

    def _add(self, work: Callable[[], T]) -> Future[T]:
        answer: Future[T] = Future()
        self._jobs.put((answer, work))
        return answer

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            answer, work = job
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(work())
                except BaseException as error:  # a thread that ended here would leave all later calls without an answer
                    answer.set_exception(as_exception(error))
