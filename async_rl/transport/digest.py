"""One name for a set of weights: what the learner published is what a worker serves, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import xxhash

from async_rl.parameter_spec import ParameterSpec


def specs_of(tensors: Mapping[str, torch.Tensor]) -> tuple[ParameterSpec, ...]:
    return tuple(
        ParameterSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    )


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as one row of bytes; a copy only when it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """What `VersionRecord.digest` holds. Does not depend on the order of the tensors, the device or the bucket size."""
    digest = WeightsDigest(specs_of(tensors))
    for name, tensor in tensors.items():
        digest.update(name, bytes_of(tensor))
    return digest.hexdigest()


class WeightsDigest:
    """Fed piece by piece, so that hashing what has arrived overlaps with receiving the rest."""

    def __init__(self, specs: Sequence[ParameterSpec]) -> None:
        self._specs = sorted(specs, key=lambda spec: spec.name)
        self._hashers = {spec.name: xxhash.xxh3_64() for spec in specs}

    def update(self, name: str, data: torch.Tensor) -> None:
        self._hashers[name].update(data.cpu().numpy().data)

    def hexdigest(self) -> str:
        lines = (f"{spec.name} {spec.dtype} {spec.shape} {self._hashers[spec.name].hexdigest()}\n" for spec in self._specs)
        return xxhash.xxh3_128_hexdigest("".join(lines).encode())
