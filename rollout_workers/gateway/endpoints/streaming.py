"""Server-sent events. Streams start after the generation has ended: they send the finished answer in chunks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

from aiohttp import web


async def stream_data(request: web.Request, chunks: Iterable[Mapping[str, Any]]) -> web.StreamResponse:
    """Send unnamed events and a final [DONE], for chat and completions."""
    return await _stream(request, chain((f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), ["data: [DONE]\n\n"]))


async def stream_events(request: web.Request, events: Iterable[Mapping[str, Any]]) -> web.StreamResponse:
    """Send events named by their `type`, for responses."""
    return await _stream(request, (f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events))


async def _stream(request: web.Request, pieces: Iterable[str]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    with suppress(ConnectionError):  # the client left; its sampled tokens stay in the tree
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece.encode())
        await response.write_eof()
    return response
