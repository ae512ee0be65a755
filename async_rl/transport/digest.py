"""Digests of weights: they prove that a worker serves, bit for bit, what the learner packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    """Digest of full parameters. Independent of their order, device and strides."""
    lines = sorted(
        f"{spec.name} {spec.dtype} {spec.shape} {xxhash.xxh3_64_hexdigest(_bytes_of(tensors[spec.name]))}"
        for spec in specs_of(tensors)
    )
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())


def version_digest(layout: str, chunks: Sequence[Sequence[str]]) -> str:
    """`VersionRecord.digest`: covers the layout's digest and the digest of every chunk of every parcel."""
    return xxhash.xxh3_128_hexdigest("\n".join([layout, *(" ".join(parcel) for parcel in chunks)]).encode())


class ChunkHasher:
    """Digests of the chunks of flat bytes that are written in order; each part is hashed as soon as it is written."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._chunk = xxhash.xxh3_64()
        self.num_hashed = 0
        self.digests: list[str] = []

    def hash_up_to(self, written: int) -> None:
        while self.num_hashed < written:
            end = min(written, (self.num_hashed // CHUNK_BYTES + 1) * CHUNK_BYTES)
            self._chunk.update(self._data[self.num_hashed : end].cpu().numpy().data)
            self.num_hashed = end
            if end % CHUNK_BYTES == 0 or end == len(self._data):
                self.digests.append(self._chunk.hexdigest())
                self._chunk.reset()


def chunk_digest(data: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(data.cpu().numpy().data)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data
