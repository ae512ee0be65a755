"""Log lines for people, on stderr: when, how bad, which role, what."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

OURS = ("async_rl", "buffer", "learner", "rollout_workers")


def configure_logs(role: str, *, rank: int | None = None) -> None:
    """Both structlog and the standard library's loggers end up here. Libraries speak from WARNING on, we from INFO on."""
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
                # Plain tracebacks: rich ones take tenths of a second each and show local variables, tokens among them.
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
    """A stranger's bytes are answered with 400 and are no error of ours: a flood of them must not become a flood of lines."""
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__module__ != "aiohttp.http_exceptions"


class _Stderr(logging.Handler):
    """Writes to whatever sys.stderr is at the moment: the live panel replaces it while it is on the screen."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)
