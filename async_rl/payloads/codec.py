"""Encodes a RolloutGroup as bytes. The format holds data only: a hostile payload can at worst be refused.

    magic "ARLG" | schema u16 | codec u8 | flags u8 | length u32 of the body | xxh3 u64 of the body | body
    body = number of tokens u32 | token ids i32 ... | logprobs f32 ... | loss mask u8 ... | records

Everything is little-endian. A column holds the tokens of one sample after the other, aligned, so that reading copies nothing.
The records are msgpack, with codec 1 compressed by zstd. Columns are never compressed: text shrinks to a third, while token
ids and logprobs hardly shrink and cost ten times as long.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
import xxhash

from async_rl.payloads.records import MAX_ITEMS, BadPayload, MsgpackValue, read_fields, read_group, read_spans, write_group
from async_rl.types import RolloutGroup, Sample

MAX_BYTES = 256 * 2**20
"""Limit of a payload; a larger one is refused unread."""
MAX_RECORD_BYTES = 32 * 2**20
"""Limit of the uncompressed records: a byte of msgpack can become a list of 64 bytes, a byte of zstd thousands of bytes."""
WORTH_COMPRESSING = 1024
"""Records shorter than this many bytes do not shrink by half, and stay uncompressed."""

_HEADER = struct.Struct("<4sHBBIQ")
_COUNT = struct.Struct("<I")
_MAGIC = b"ARLG"
_SCHEMA = 2
_PLAIN, _ZSTD = 0, 1

_TOKEN_ID = np.dtype("<i4")
_LOGPROB = np.dtype("<f4")
_MASK = np.dtype("u1")
_TOKEN_BYTES = _TOKEN_ID.itemsize + _LOGPROB.itemsize + _MASK.itemsize

_MALFORMED = (ValueError, TypeError, ArithmeticError, MemoryError, struct.error, msgpack.UnpackException)

_pack = cast("Callable[[object], bytes]", cast("Any", msgpack).packb)
_unpack = cast(
    "Callable[[bytes | memoryview], MsgpackValue]",
    partial(cast("Any", msgpack).unpackb, strict_map_key=True, max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS, max_ext_len=0),
)


def encode(group: RolloutGroup, *, compress_text: bool = False) -> bytes:
    """Raises BadPayload for a group that cannot be written or is too large."""
    samples = [sample for rollout in group.rollouts for sample in rollout.samples]
    columns = _columns(samples)
    try:
        records = _pack(write_group(group))
    except (ValueError, TypeError, AttributeError, OverflowError, LookupError) as error:
        raise BadPayload(f"it cannot be written: {str(error)[:200]!r}") from error
    if len(records) > MAX_RECORD_BYTES:
        raise BadPayload(f"its records take {len(records)} bytes, above the limit of {MAX_RECORD_BYTES}")
    codec = _PLAIN
    if compress_text and len(records) >= WORTH_COMPRESSING:
        codec, records = _ZSTD, _compress(records)
    count = sum(map(len, samples))
    return _with_header(codec, [_COUNT.pack(count), *columns, records], _COUNT.size + count * _TOKEN_BYTES + len(records))


def decode(payload: bytes | memoryview) -> RolloutGroup:
    """Return the group; its arrays are read-only views into the payload. Raises BadPayload."""
    schema, codec = _check_header(payload)
    read = _READERS.get((schema, codec))
    if read is None:
        wrote = "an older version" if schema < _SCHEMA else "a newer version; upgrade the learner"
        raise BadPayload(f"schema {schema} with codec {codec} is unknown here; it was written by {wrote}")
    try:
        return read(payload)
    except _MALFORMED as error:
        raise BadPayload(f"the body is malformed: {type(error).__name__}") from error


# -- the envelope ---------------------------------------------------------------------------------------------------
def _with_header(codec: int, parts: list[Any], length: int) -> bytes:
    """Put the header before the parts; they are hashed one by one, so that a large payload is copied only once."""
    if length + _HEADER.size > MAX_BYTES:
        raise BadPayload(f"a group of {length} bytes is above the limit of {MAX_BYTES}")
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(part)
    return b"".join([_HEADER.pack(_MAGIC, _SCHEMA, codec, 0, length, checksum.intdigest()), *parts])


def _check_header(payload: bytes | memoryview) -> tuple[int, int]:
    """Check header, length and checksum; return schema and codec. Raises BadPayload."""
    if not _HEADER.size <= len(payload) <= MAX_BYTES:
        raise BadPayload(f"a payload has between {_HEADER.size} and {MAX_BYTES} bytes, this one has {len(payload)}")
    magic, schema, codec, flags, length, checksum = _HEADER.unpack_from(payload)
    if magic != _MAGIC:
        raise BadPayload("it does not begin with a group's magic bytes")
    if flags:
        raise BadPayload(f"flags {flags} are unknown here; it was written by a newer version; upgrade the learner")
    body = memoryview(payload)[_HEADER.size :]
    if length != len(body):
        raise BadPayload(f"the body should have {length} bytes and has {len(body)}")
    if checksum != xxhash.xxh3_64_intdigest(body):
        raise BadPayload("the checksum does not match")
    return schema, codec


# -- schema 2 -------------------------------------------------------------------------------------------------------
def _columns(samples: list[Sample]) -> list[Any]:
    for sample in samples:
        _check_lengths(sample)
    return [
        *[np.ascontiguousarray(sample.token_ids, _TOKEN_ID) for sample in samples],
        *[np.ascontiguousarray(sample.logprobs, _LOGPROB) for sample in samples],
        *[np.ascontiguousarray(sample.loss_mask, _MASK) for sample in samples],
    ]


def _check_lengths(sample: Sample) -> None:
    if not sample.token_ids.shape == sample.logprobs.shape == sample.loss_mask.shape == (len(sample),):
        raise BadPayload("the arrays of a sample differ in length")


def _read_schema_2(payload: bytes | memoryview, *, is_compressed: bool) -> RolloutGroup:
    (count,) = _COUNT.unpack_from(payload, _HEADER.size)
    first_id = _HEADER.size + _COUNT.size
    first_logprob = first_id + count * _TOKEN_ID.itemsize
    first_mask = first_logprob + count * _LOGPROB.itemsize
    token_ids = np.frombuffer(payload, _TOKEN_ID, count, first_id)
    logprobs = np.frombuffer(payload, _LOGPROB, count, first_logprob)
    loss_mask = np.frombuffer(payload, _MASK, count, first_mask)
    stop = 0

    def read_sample(value: MsgpackValue) -> Sample:
        """Consume the next sample's part of the columns."""
        nonlocal stop
        length, spans = read_fields(value, "a sample", int, list)
        if not 0 <= length <= count - stop:
            raise BadPayload("a sample does not fit its columns")
        start, stop = stop, stop + length
        part = slice(start, stop)
        return Sample(token_ids=token_ids[part], loss_mask=loss_mask[part], logprobs=logprobs[part], versions=read_spans(spans))

    records = memoryview(payload)[first_mask + count * _MASK.itemsize :]
    group = read_group(_unpacked(_decompress(records) if is_compressed else records), read_sample)
    if stop != count:
        raise BadPayload("tokens are left over that no sample owns")
    return group


def _unpacked(records: bytes | memoryview) -> MsgpackValue:
    if len(records) > MAX_RECORD_BYTES:
        raise BadPayload(f"its records take {len(records)} bytes, above the limit of {MAX_RECORD_BYTES}")
    return _unpack(records)


def _compress(records: bytes) -> bytes:
    import zstandard  # imported only where it is needed

    return zstandard.ZstdCompressor(level=1).compress(records)


def _decompress(records: memoryview) -> bytes:
    import zstandard

    try:
        size = zstandard.frame_content_size(records)
        if not 0 <= size <= MAX_RECORD_BYTES:
            raise BadPayload(f"its records announce a size of {size} bytes, the limit is {MAX_RECORD_BYTES}")
        return zstandard.ZstdDecompressor().decompress(records, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadPayload("its records cannot be decompressed") from error


# -- schema 1: no columns, each sample carries its arrays -----------------------------------------------------------
def _read_schema_1(payload: bytes | memoryview) -> RolloutGroup:
    return read_group(_unpacked(memoryview(payload)[_HEADER.size :]), _read_whole_sample)


def _read_whole_sample(value: MsgpackValue) -> Sample:
    token_ids, loss_mask, logprobs, spans = read_fields(value, "a sample", bytes, bytes, bytes, list)
    sample = Sample(
        token_ids=np.frombuffer(token_ids, _TOKEN_ID),
        loss_mask=np.frombuffer(loss_mask, _MASK),
        logprobs=np.frombuffer(logprobs, _LOGPROB),
        versions=read_spans(spans),
    )
    _check_lengths(sample)
    return sample


_READERS: Mapping[tuple[int, int], Callable[[bytes | memoryview], RolloutGroup]] = {
    (1, _PLAIN): _read_schema_1,
    (2, _PLAIN): partial(_read_schema_2, is_compressed=False),
    (2, _ZSTD): partial(_read_schema_2, is_compressed=True),
}
"""(schema, codec) -> reader. The previous schema stays readable for one release, so that a run can be upgraded live."""
