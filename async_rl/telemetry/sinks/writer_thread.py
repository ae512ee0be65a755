"""Runs a metrics sink on its own thread, so that training never waits for a network or a slow disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping

import structlog

from async_rl.protocols import MetricsSink

log = structlog.get_logger("async_rl.telemetry")

CLOSE_S = 30.0
"""Seconds that the last rows may take to be written."""


class WriterThread:
    """A MetricsSink that passes rows to another one on a thread. After an error of that sink, rows are discarded.

    consumes: rows from a bounded queue; when it is full, the oldest is dropped and counted     waits for:    the next row
    produces: calls of the sink                                                                 unblocked by: `log`; `close`
    """

    def __init__(self, name: str, sink: MetricsSink, *, capacity: int = 4096) -> None:
        self._name = name
        self._sink = sink
        self._rows: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(capacity)  # None: closed
        self.dropped = 0
        self._thread = threading.Thread(target=self._write, name=f"{name}-writer", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._put((step, dict(metrics)))

    def close(self) -> None:
        self._put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning(f"{self._name} did not finish writing within {CLOSE_S:g} s; the rest is lost")
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
            except BaseException as error:  # no error of a third-party sink may stop training
                broken = True
                log.warning(f"{self._name} stopped: {error}")
