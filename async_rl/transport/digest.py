"""One name for a version's weights: what the learner packed is what a worker serves, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import xxhash

from async_rl.models.parameter_spec import ParameterSpec
from async_rl.transport.plan import CHUNK_BYTES


def specs_of(tensors: Mapping[str, torch.Tensor]) -> tuple[ParameterSpec, ...]:
    return tuple(
        ParameterSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    )


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of full parameters, wherever they come from. Does not depend on their order, their device or their strides."""
    lines = sorted(
        f"{spec.name} {spec.dtype} {spec.shape} {xxhash.xxh3_64_hexdigest(_bytes_of(tensors[spec.name]))}"
        for spec in specs_of(tensors)
    )
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())


def version_digest(layout: str, chunks: Sequence[Sequence[str]]) -> str:
    """What `VersionRecord.digest` holds: of the layout, and of every chunk of every parcel."""
    return xxhash.xxh3_128_hexdigest("\n".join([layout, *(" ".join(parcel) for parcel in chunks)]).encode())


def chunk_digests(data: torch.Tensor) -> Iterator[str]:
    """Of flat bytes, chunk by chunk."""
    for start in range(0, len(data), CHUNK_BYTES):
        yield chunk_digest(data[start : start + CHUNK_BYTES])


class ChunkDigests:
    """Of flat bytes that are written in order, each part hashed as soon as it is there."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._chunk = xxhash.xxh3_64()
        self.hashed = 0
        self.complete: list[str] = []

    def up_to(self, written: int) -> None:
        while self.hashed < written:
            end = min(written, (self.hashed // CHUNK_BYTES + 1) * CHUNK_BYTES)
            self._chunk.update(self._data[self.hashed : end].cpu().numpy().data)
            self.hashed = end
            if end % CHUNK_BYTES == 0 or end == len(self._data):
                self.complete.append(self._chunk.hexdigest())
                self._chunk.reset()


def chunk_digest(data: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(data.cpu().numpy().data)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data
