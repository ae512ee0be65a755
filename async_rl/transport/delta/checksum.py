"""The digest in a delta's header, by which both encodings refuse bytes that arrived damaged."""

from __future__ import annotations

import struct

import xxhash

_DIGEST = struct.Struct("<Q")
DIGEST_BYTES = _DIGEST.size


def digest(head: bytes, rest: bytes | memoryview) -> bytes:
    hasher = xxhash.xxh3_64(head)
    hasher.update(rest)
    return _DIGEST.pack(hasher.intdigest())
