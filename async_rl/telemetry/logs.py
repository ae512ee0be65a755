"""Log lines on stderr: time, level, role, message."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import structlog

from async_rl.telemetry.warning_file import WarningFile

OURS = ("async_rl", "buffer", "learner", "rollout_workers")


def configure_logs(role: str, *, rank: int | None = None, run_folder: Path | None = None) -> None:
    """Configure structlog and the standard library's loggers: our packages from INFO, libraries from WARNING.

    With `run_folder`, warnings and errors are also appended to the warnings.jsonl in it.
    """
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
                    colors=_shows_colours(), pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
                ),
            ],
        )
    )
    kept = [] if run_folder is None else [WarningFile(run_folder, role)]
    logging.basicConfig(level=logging.WARNING, handlers=[handler, *kept], force=True)
    logging.captureWarnings(True)
    for name in OURS:
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("aiohttp.server").addFilter(_is_no_malformed_request)
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(role=role, **({} if rank is None else {"rank": rank}))


def _shows_colours() -> bool:
    """Whether stderr is a terminal and NO_COLOR (https://no-color.org) is not set."""
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR")


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
