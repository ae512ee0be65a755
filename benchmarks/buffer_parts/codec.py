"""Encoding and decoding one rollout of 4,096 tokens, beside a plain copy of the same bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from async_rl.payloads.codec import decode, encode
from buffer_parts.groups import group

TOKENS = 4096
REPEATS = 300


def codec_us() -> dict[str, float]:
    """Return medians; each turn measures all three, so that a change in the machine's load affects them alike."""
    rollout = group(TOKENS, seed=0, size=1)
    payload = encode(rollout)
    work: dict[str, Callable[[], object]] = {
        "encode": lambda: encode(rollout),
        "decode": lambda: decode(payload),
        "memcpy": lambda: bytearray(payload),
    }
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(REPEATS):
        for name, run in work.items():
            started = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - started)
    return {name: 1e6 * statistics.median(seconds) for name, seconds in taken.items()}
