"""Sends the spans of a run while it lives, on a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import structlog

from async_rl.recording.events import Event
from async_rl.recording.recorded import RecordedGroup
from async_rl.recording.spans.making import SpanMaker
from async_rl.recording.spans.sender import AT_ONCE, SpanSender
from async_rl.recording.spans.span import Span

CAPACITY = 32 * AT_ONCE
"""Spans that may wait to be sent; further ones are dropped and counted."""
GATHER_S = 1.0
"""Longest time for which a span waits for others to be sent with it."""
CLOSE_S = 5.0
"""Seconds that the last spans may take."""

log = structlog.get_logger("async_rl.recording")


class SpanExport:
    """Takes events and groups as they are recorded. Never raises, and never waits for the endpoint.

    consumes: spans from a bounded queue; beyond it they are counted     waits for:    the next one
    produces: requests to the endpoint                                   unblocked by: `event`, `group`; `close`
    """

    def __init__(self, maker: SpanMaker, sender: SpanSender) -> None:
        self._maker, self._sender = maker, sender
        self._queue: queue.Queue[Span | None] = queue.Queue(CAPACITY)  # None: closed
        self._is_closed = self._is_refused = False
        self._late = self._refused = 0
        """Dropped spans: they came too fast; the endpoint did not take them."""
        self._thread = threading.Thread(target=self._send, name="span-export", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Spans that were not sent, since the process started."""
        return self._late + self._refused

    def event(self, event: Event) -> None:
        self._add(lambda: self._maker.of_event(event))

    def group(self, group: RecordedGroup) -> None:
        self._add(lambda: self._maker.of_group(group))

    def close(self) -> None:
        """Send what waits, for at most `CLOSE_S`."""
        if self._is_closed:
            return
        self._is_closed, ends = True, time.monotonic() + CLOSE_S
        with suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_S)
        self._thread.join(max(0.0, ends - time.monotonic()))
        if self._thread.is_alive():
            log.warning(f"{self._sender.endpoint} did not take the last spans within {CLOSE_S:g} s; they are lost")
        self._sender.close()

    def _add(self, make: Callable[[], list[Span]]) -> None:
        try:
            spans = make()
        except Exception as error:  # values of user code: training goes on
            log.warning(f"something that is recorded has no spans: {error}"[:500])
            self._late += 1
            return
        for number, span in enumerate(spans):
            try:
                self._queue.put_nowait(span)
            except queue.Full:
                self._late += len(spans) - number
                return

    def _send(self) -> None:
        is_open = True
        while is_open:
            spans, is_open = self._gather()
            if spans and (problem := self._sender.send(spans)):
                self._refused += len(spans)
                if not self._is_refused:
                    log.warning(f"{self._sender.endpoint} takes no spans: {problem}; they are lost, training continues")
                self._is_refused = True
            elif spans and self._is_refused:
                log.info(f"{self._sender.endpoint} takes spans again; missing so far: {self.dropped}")
                self._is_refused = False

    def _gather(self) -> tuple[list[Span], bool]:
        """Wait for spans and return those that came within `GATHER_S`; and whether more may come."""
        spans, span = list[Span](), self._queue.get()
        until = time.monotonic() + GATHER_S
        while span is not None:
            spans.append(span)
            if len(spans) == AT_ONCE:
                return spans, True
            try:
                span = self._queue.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return spans, True
        return spans, False
