"""A span, and the ids of traces and spans: hashes of what they stand for, so that nothing has to be handed from process to
process, and a window that is sent again has the same ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Value = str | int | float | bool | Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanId:
    trace: int
    """128 bits."""
    span: int
    """64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    name: str
    """One of few: what tells one from another is in the attributes."""
    process: str
    """learner, buffer, or a worker."""
    id: SpanId
    start: float
    """Seconds since 1970, on the learner's clock."""
    stop: float
    parent: int | None = None
    """The 64 bits of a span of the same trace."""
    attributes: Mapping[str, Value] = field(default_factory=dict[str, Value])
    links: tuple[SpanId, ...] = ()
    error: str = ""
    """Why what it stands for failed; "": it did not."""


def trace_of(run: str, what: str) -> int:
    """Return the id of a trace. `run`: the run's id; `what`: `group t000000017`, `step 12`, `push 7`."""
    return _bits(f"trace/{run}/{what}", 16)


def span_of(trace: int, what: str) -> SpanId:
    """Return the id of a span of a trace; `what` tells it from the others of the trace."""
    return SpanId(trace=trace, span=_bits(f"span/{trace:032x}/{what}", 8))


def is_chosen(trace: int, share: float) -> bool:
    """Whether a trace is among the `share` that is sent; the same everywhere, as it follows from the id."""
    return (trace & 0xFFFFFFFF) < share * 2**32


def _bits(text: str, size: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size], "big") or 1  # 0 is no id
