"""The byte format of a compact delta, and the checks made before it is used.

header      format, dtype, how many elements and exponents, how long the streams are; a digest of this and all that follows
exponents   of changed elements, ascending, a byte each; then the number of changes of each, 4 bytes each
decisions   the first stream of integer_coder.encode_integers: all gaps, then all steps less one
rests       its second stream
signs       a bit for each change, set where the weight became smaller
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from async_rl.errors import WireError
from async_rl.transport.delta.checksum import DIGEST_BYTES, digest

Bytes = npt.NDArray[np.uint8]

_FORMAT = 1
_HEADER = struct.Struct("<BBHIII")
_PER_EXPONENT = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delta:
    dtype_code: int
    num_elements: int
    counts: npt.NDArray[np.int64]
    """Number of changes for each of 256 exponents."""
    decisions: Bytes
    rests: Bytes
    signs: Bytes

    @property
    def num_changes(self) -> int:
        return int(self.counts.sum())

    def to_bytes(self) -> bytes:
        exponents = np.flatnonzero(self.counts)
        head = _HEADER.pack(
            _FORMAT, self.dtype_code, len(exponents), self.num_elements, len(self.decisions), len(self.rests)
        )  # fmt: skip
        parts = (exponents.astype(np.uint8), self.counts[exponents].astype("<u4"), self.decisions, self.rests, self.signs)
        rest = b"".join(part.tobytes() for part in parts)
        return b"".join([head, digest(head, rest), rest])

    @staticmethod
    def from_bytes(sent: bytes) -> Delta:
        """Parse a delta. Raises WireError unless its sizes and digest agree; the streams' content is not checked here."""
        if len(sent) < _HEADER.size + DIGEST_BYTES:
            raise WireError(f"a delta of {len(sent)} bytes is too short")
        found, dtype_code, num_exponents, num_elements, num_decisions, num_rests = _HEADER.unpack_from(sent)
        if found != _FORMAT:
            raise WireError(f"a delta of format {found} arrived, and this process reads format {_FORMAT}")
        head, rest = sent[: _HEADER.size], memoryview(sent)[_HEADER.size + DIGEST_BYTES :]
        if digest(head, rest) != sent[_HEADER.size : _HEADER.size + DIGEST_BYTES]:
            raise WireError("a delta arrived damaged")
        streams_at = num_exponents * _PER_EXPONENT
        if num_exponents > 256 or streams_at + num_decisions + num_rests > len(rest):
            raise WireError("a delta is shorter than its header promises")
        exponents = np.frombuffer(rest, np.uint8, num_exponents).astype(np.int64)
        each = np.frombuffer(rest, "<u4", num_exponents, num_exponents).astype(np.int64)
        if np.any(np.diff(exponents) <= 0) or np.any(each == 0) or each.sum() > num_elements:
            raise WireError("a delta's counts are impossible")
        streams = np.split(np.frombuffer(rest, np.uint8, offset=streams_at), [num_decisions, num_decisions + num_rests])
        counts = np.zeros(256, np.int64)
        counts[exponents] = each
        delta = Delta(
            dtype_code=dtype_code, num_elements=num_elements, counts=counts,
            decisions=streams[0], rests=streams[1], signs=streams[2],
        )  # fmt: skip
        if len(delta.signs) != (delta.num_changes + 7) // 8:
            raise WireError("a delta's signs and changes differ in number")
        return delta
