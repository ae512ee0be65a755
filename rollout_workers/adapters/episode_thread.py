"""One thread for all calls of one episode into a blocking library."""

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
    """Runs calls in order on one thread, as simulators bound to their thread demand.

    A call that hangs goes on after the episode's deadline; the daemon thread does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        Thread(target=self._work, name=name, daemon=True).start()

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._add(work))

    def finish(self, work: Callable[[], object]) -> None:
        """Queue the last call, after which the thread ends. Does not wait."""
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
                except BaseException as error:  # if the thread ended here, later calls would wait forever
                    answer.set_exception(as_exception(error))
