"""A sink whose writing may block, moved to a thread of its own: a step never waits for a network or a slow disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping

import structlog

from async_rl.protocols import MetricsSink

log = structlog.get_logger("async_rl.telemetry")


class WriterThread:
    """Rows wait in a bounded queue; when it is full the oldest is dropped and counted. A sink that fails is given up."""

    # In the queue, None says that nothing follows.

    def __init__(self, name: str, sink: MetricsSink, *, capacity: int = 4096, close_within_s: float = 30.0) -> None:
        self._name = name
        self._sink = sink
        self._rows: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(capacity)
        self._close_within_s = close_within_s
        self.dropped = 0
        self._thread = threading.Thread(target=self._write, name=f"{name}-writer", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._put((step, dict(metrics)))

    def close(self) -> None:
        self._put(None)
        self._thread.join(self._close_within_s)
        if self._thread.is_alive():
            log.warning(f"{self._name} did not finish writing within {self._close_within_s:g} s; the rest is lost")
        if self.dropped:
            log.warning(f"{self._name} was too slow and lost {self.dropped} rows")

    def _put(self, row: tuple[int, Mapping[str, float]] | None) -> None:
        while True:
            try:
                return self._rows.put_nowait(row)
            except queue.Full:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        try:
            self._rows.get_nowait()
        except queue.Empty:  # the thread was faster
            return
        self.dropped += 1

    def _write(self) -> None:
        """Until closed. After a failure rows are still taken from the queue, but go nowhere."""
        broken = False
        closing = False
        while not closing:
            row = self._rows.get()
            closing = row is None
            if broken:
                continue
            try:
                if row is None:
                    self._sink.close()
                else:
                    self._sink.log(*row)
            except BaseException as error:  # whatever a third-party writer raises, training is worth more than its curves
                broken = True
                log.warning(f"{self._name} stopped: {error}")
