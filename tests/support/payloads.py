"""Payloads assembled by hand, and groups that can be compared."""

from __future__ import annotations

import base64
import struct

import msgpack
import numpy as np
import xxhash

HEADER = struct.Struct("<4sHBBIQ")


def sealed(body: bytes, *, magic: bytes = b"ARLG", schema: int = 2, codec: int = 0, flags: int = 0) -> bytes:
    """Wrap a body in a valid header."""
    return HEADER.pack(magic, schema, codec, flags, len(body), xxhash.xxh3_64_intdigest(body)) + body


def columns(count: int) -> bytes:
    """Return columns of `count` zero tokens, of which only the last is sampled."""
    return struct.pack("<I", count) + bytes(8 * count) + (bytes(count - 1) + b"\x01" if count else b"")


def body(records: object, count: int = 2) -> bytes:
    return columns(count) + (records if isinstance(records, bytes) else msgpack.packb(records))


def plain(value: object) -> object:
    """Return a value that is comparable with ==, also with NaN: arrays and floats become their bytes and type."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {name: plain(element) for name, element in value.items()}
    return [plain(element) for element in value] if isinstance(value, tuple) else value


TASK = ["k", "e", "p", "", {}]
SAMPLE = [2, [0, 1, 2]]
ROLLOUT = [[SAMPLE], 1.0, "ok", None, {}, {}, []]
SOUND = ["t", TASK, [ROLLOUT], "w"]

SCHEMA_1 = base64.b64decode(
    "QVJMRwEAAAARAQAAlVu0VdJWH2GUqnQwMDAwMDAwNDKVpnN1bXMvN6RzdW1zkZKkdXNlcqkyICsgMiA9ID+hNIKlbGV2ZWwBpGV2ZW7DkpeSlMQQ"
    "CwAAAAwAAAANAAAADgAAAMQEAAABAcQQAAAAAAAAAAAAAAC/AACgv5YDAgMEAwSUxAgHAAAACAAAAMQCAAHECAAAAAAAAIC+kwQBAss/4AAAAAAA"
    "AKJva8CBpWV4YWN0yz/wAAAAAAAAgaV0dXJuc8tAAAAAAAAAAJKSpHVzZXKpMiArIDIgPSA/kqlhc3Npc3RhbnSlNCDinJOXkMsAAAAAAAAAAKZm"
    "YWlsZWSTq2Vudmlyb25tZW50qEtleUVycm9yp25vIGRvb3KAgJCidzE="
)
"""A payload of schema 1, written by the release that used it."""
