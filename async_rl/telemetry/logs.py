"""Log lines on stderr: time, level, role, message."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

OURS = ("async_rl", "buffer", "learner", "rollout_workers")


def configure_logs(role: str, *, rank: int | None = None) -> None:
    """Configure structlog and the standard library's loggers: our packages from INFO, libraries from WARNING."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S"),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = _Stderr()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                # Rich tracebacks would take tenths of a second each and show local variables, including tokens.
                structlog.dev.ConsoleRenderer(
                    colors=sys.stderr.isatty(), pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
                ),
            ],
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in OURS:
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("aiohttp.server").addFilter(_is_no_malformed_request)
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(role=role, **({} if rank is None else {"rank": rank}))


def _is_no_malformed_request(record: logging.LogRecord) -> bool:
    """False for aiohttp's records of malformed requests: they are answered with 400, and could flood the log."""
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__module__ != "aiohttp.http_exceptions"


class _Stderr(logging.Handler):
    """Writes to the current sys.stderr, which the live panel replaces while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)
