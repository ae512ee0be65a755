"""The wire's own stream on a GPU: its copies run beside training and decoding. On a CPU there is none, and nothing is copied.

Three rules keep the memory safe that streams share:

1. Leaving `transport_stream` waits for what was queued there: afterwards any stream may use the tensors.
2. What another stream has written is awaited (`queued_so_far`) before it is read here.
3. Nothing is queued here that waits for another process: Link polls, and waits for operations that are complete.

Run on one H200: docs/gpu.md.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from threading import Lock

import torch

_STREAMS: dict[torch.device, torch.cuda.Stream] = {}
"""One for each GPU: torch's allocator keeps the memory of each stream apart."""

_OPENING = Lock()


@contextmanager
def transport_stream(device: torch.device) -> Generator[None]:
    """Queue this thread's GPU work on the wire's stream; leaving the context without an exception waits until it is done."""
    if device.type != "cuda":
        yield
        return
    with _OPENING:
        if (stream := _STREAMS.get(device)) is None:
            stream = _STREAMS[device] = torch.cuda.Stream(device)
    # The device first: the thread's may be another, on which torch would make a context when it returns to its stream.
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
        queued_so_far(device)()


def queued_so_far(device: torch.device) -> Callable[[], None]:
    """Mark what is queued on this thread's stream. The returned call blocks, on any thread, until all of it is done."""
    if device.type != "cuda":
        return lambda: None
    mark = torch.cuda.Event(blocking=True)  # sleeps instead of keeping a core busy
    mark.record(torch.cuda.current_stream(device))
    return mark.synchronize


def on_host(parts: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The parts in host memory, one after the other. Those of a GPU are copies: use them inside `transport_stream`.

    While the caller reads one part, the next is copied.
    """
    before: tuple[torch.Tensor, Callable[[], None]] | None = None
    for part in parts:
        if part.device.type == "cpu":
            yield part
            continue
        copy = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)  # from torch's cache of pinned memory
        copy.copy_(part, non_blocking=True)
        under_way = copy, queued_so_far(part.device)
        if before is not None:
            yield _complete(*before)
        before = under_way
    if before is not None:
        yield _complete(*before)


def _complete(copy: torch.Tensor, wait: Callable[[], None]) -> torch.Tensor:
    wait()
    return copy
