"""Digests of weights: they prove that a worker serves, bit for bit, what the learner packed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

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


def chunks_of(data: torch.Tensor, numbers: Iterable[int] | None = None) -> Iterator[torch.Tensor]:
    """The chunks of flat bytes: all, or those with these numbers."""
    for number in numbers if numbers is not None else range(math.ceil(len(data) / CHUNK_BYTES)):
        yield data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]


def chunk_digest(data: torch.Tensor) -> str:
    """Digest of bytes in host memory."""
    return xxhash.xxh3_64_hexdigest(data.numpy().data)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data
