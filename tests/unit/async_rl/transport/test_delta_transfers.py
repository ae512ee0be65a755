"""What a delta is sent in: transfers of `wire.bucket_mb` at most, also where pieces are sent whole."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from async_rl.transport.delta.parallel_codec import PIECE_BYTES
from async_rl.transport.delta.parcel_delta import DeltaPiece, Encoding, receive_delta, send_delta
from async_rl.transport.wire.process_group import Link

TRANSFER_BYTES = 1 << 20


class Recorded:
    """A link that keeps what is sent, then gives it to a receiver."""

    def __init__(self) -> None:
        self.sent: deque[Tensor] = deque()
        self.is_sender = True

    def share(self, data: Tensor) -> Tensor:
        if self.is_sender:
            self.sent.append(data.clone())
            return data
        return data.copy_(self.sent.popleft())

    def begin_barrier(self) -> Any: ...

    def wait(self, _work: Any) -> None: ...


@pytest.mark.parametrize("encoding", ["compact", "parallel"])
def test_no_transfer_is_larger_than_allowed(encoding: Encoding) -> None:
    length = PIECE_BYTES // 8
    old = torch.arange(3 * length // 4, dtype=torch.int32).view(torch.uint8)
    new = (old.view(torch.int32) + 1).view(torch.uint8)
    pieces = [DeltaPiece(start=at, stop=at + length, dtype="float32", encoding=encoding) for at in range(0, len(old), length)]
    if encoding == "compact":
        pytest.importorskip("numba")
    link, image = Recorded(), old.clone()
    assert send_delta(cast("Link", link), pieces, old, new, transfer_bytes=TRANSFER_BYTES) == len(new)
    assert max(each.nbytes for each in link.sent) <= TRANSFER_BYTES
    link.is_sender, ends = False, list[int]()
    receive_delta(cast("Link", link), pieces, image, ends.append, transfer_bytes=TRANSFER_BYTES)
    assert torch.equal(image, new)
    assert ends == [piece.stop for piece in pieces]
    assert not link.sent
