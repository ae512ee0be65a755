"""A real OTLP/HTTP receiver: takes the protobuf messages of traces, as a collector does, and keeps the spans."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(frozen=True, kw_only=True)
class ReceivedSpan:
    name: str
    service: str
    instance: str
    trace: str
    id: str
    parent: str
    begin: float
    end: float
    attributes: dict[str, Any]
    links: list[tuple[str, str]]
    error: str


@dataclass(kw_only=True)
class OtlpReceiver:
    url: str = ""
    status: int = 200
    """What it answers."""
    spans: list[ReceivedSpan] = field(default_factory=list[ReceivedSpan])
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    requests: int = 0

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def under(self, parent: ReceivedSpan) -> list[ReceivedSpan]:
        """The children of a span, in the order in which they begin."""
        found = [span for span in self.spans if (span.trace, span.parent) == (parent.trace, parent.id)]
        return sorted(found, key=lambda span: span.begin)

    async def take(self, request: web.Request) -> web.Response:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.requests += 1
        assert request.content_type == "application/x-protobuf"
        body = await request.read()
        message = ExportTraceServiceRequest.FromString(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
        if self.status == 200:
            self.headers.append(dict(request.headers))
            self.spans += _spans(message)
        return web.Response(status=self.status)


@contextmanager
def otlp_receiver(status: int = 200) -> Iterator[OtlpReceiver]:
    """Listen on a free port, on a thread of its own."""
    receiver, loop, listens = OtlpReceiver(status=status), asyncio.new_event_loop(), threading.Event()
    application = web.Application(client_max_size=2**26)
    application.router.add_post("/v1/traces", receiver.take)
    runner = web.AppRunner(application)

    async def listen() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    def serve() -> None:
        loop.run_until_complete(listen())
        listens.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert listens.wait(30)
    try:
        yield receiver
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)


def _spans(message: Any) -> Iterator[ReceivedSpan]:
    for of_process in message.resource_spans:
        about = _values(of_process.resource.attributes)
        for span in (span for scope in of_process.scope_spans for span in scope.spans):
            yield ReceivedSpan(
                name=span.name,
                service=about["service.name"],
                instance=about["service.instance.id"],
                trace=span.trace_id.hex(),
                id=span.span_id.hex(),
                parent=span.parent_span_id.hex(),
                begin=span.start_time_unix_nano / 1e9,
                end=span.end_time_unix_nano / 1e9,
                attributes=_values(span.attributes),
                links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                error=span.status.message if span.status.code == 2 else "",
            )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
