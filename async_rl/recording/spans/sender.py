"""Sends spans over OTLP/HTTP with OpenTelemetry's exporter (extra `otel`). OTEL_EXPORTER_OTLP_HEADERS and the other variables
of that library apply.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from async_rl.errors import ConfigError
from async_rl.recording.spans.making import BUFFER, LEARNER
from async_rl.recording.spans.span import Span, SpanId

PATH = "/v1/traces"
TIMEOUT_S = 3.0
"""Longest time that one request may take, its repetitions included."""
AT_ONCE = 512
"""Spans of a request."""


class SpanSender:
    """Sends spans, in the caller's thread. Raises ConfigError if the extra is missing."""

    def __init__(self, endpoint: str, *, run: str, key: str) -> None:
        """`run`: the run's name; `key`: the setting that names the endpoint, for messages."""
        self.endpoint, self._run = endpoint, run
        try:
            self._trace: Any = import_module("opentelemetry.trace")
            self._sdk: Any = import_module("opentelemetry.sdk.trace")
            self._resources: Any = import_module("opentelemetry.sdk.resources")
            self._scope: Any = import_module("opentelemetry.sdk.util.instrumentation").InstrumentationScope("async_rl")
            exporting: Any = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
            self._success: Any = import_module("opentelemetry.sdk.trace.export").SpanExportResult.SUCCESS
        except ImportError as error:
            raise ConfigError(f"{key} needs a package that is not installed: pip install 'async-rl[otel]'") from error
        session: Any = import_module("requests").Session()
        session.hooks["response"].append(self._answered)
        self._answer = ""
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # what it has to say is said once, by the caller
        url = endpoint if endpoint.endswith(PATH) else endpoint.rstrip("/") + PATH
        self._exporter = exporting.OTLPSpanExporter(endpoint=url, timeout=TIMEOUT_S, session=session)
        self._known: dict[str, Any] = {}
        """The resource of each process."""

    def send(self, spans: Sequence[Span]) -> str:
        """Send spans, at most `AT_ONCE` of them; return why they were not accepted, or "". Never raises."""
        self._answer = ""
        try:
            if self._exporter.export([self.readable(span) for span in spans]) is self._success:
                return ""
        except Exception as error:  # a value that cannot be encoded, or the library's own
            return f"they cannot be sent: {error}"[:300]
        return f"it answers {self._answer}" if self._answer else "it cannot be reached, or does not answer in time"

    def close(self) -> None:
        """End waiting for another attempt, and close the connection."""
        self._exporter.shutdown()

    def readable(self, span: Span) -> Any:
        """Return a span as the library's own."""
        codes: Any = self._trace.StatusCode
        return self._sdk.ReadableSpan(
            name=span.name,
            context=self._context(span.id),
            parent=None if span.parent is None else self._context(SpanId(trace=span.id.trace, span=span.parent)),
            resource=self._resource(span.process),
            attributes=dict(span.attributes),
            links=[self._trace.Link(self._context(link)) for link in span.links],
            status=self._trace.Status(codes.ERROR, span.error) if span.error else self._trace.Status(codes.UNSET),
            start_time=round(span.start * 1e9),
            end_time=round(span.stop * 1e9),
            instrumentation_scope=self._scope,
        )

    def _answered(self, response: Any, *_arguments: Any, **_further: Any) -> None:
        self._answer = f"{response.status_code} {response.reason}"

    def _context(self, of: SpanId) -> Any:
        sampled: Any = self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED)
        return self._trace.SpanContext(of.trace, of.span, is_remote=False, trace_flags=sampled)

    def _resource(self, process: str) -> Any:
        if (known := self._known.get(process)) is None:
            service = process if process in (LEARNER, BUFFER) else "worker"
            about = {"service.namespace": "async_rl", "service.name": f"async_rl.{service}", "service.instance.id": process}
            known = self._known[process] = self._resources.Resource.create({**about, "async_rl.run": self._run})
        return known
