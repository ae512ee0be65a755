"""Where a version lies at a worker before it is served: parcels as they travelled, read as full parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch

from async_rl.stored_weights import StoredWeights
from async_rl.transport.plan import Layout, Slice


class LandedWeights(StoredWeights):
    """Most parameters are views of the parcels; what several ranks sent a part of is put together when it is asked for."""

    def __init__(self, layout: Layout, parcels: Sequence[torch.Tensor]) -> None:
        """`parcels`: flat bytes, in the layout's order."""
        self._specs = {spec.name: spec for spec in layout.specs}
        self._parcels = parcels
        self._places: dict[str, list[tuple[int, Slice]]] = defaultdict(list)
        for number, parcel in enumerate(layout.parcels):
            for each in parcel.slices:
                self._places[each.box.name].append((number, each))

    @property
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: spec.shape for name, spec in self._specs.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        spec, places = self._specs[name], self._places.get(name, [])
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if len(places) == 1 and places[0][1].box.shape == spec.shape:
            return self._view(*places[0], dtype)
        full = torch.empty(spec.shape, dtype=dtype, device=self._parcels[0].device)
        for number, each in places:
            box = each.box
            part = tuple(slice(first, first + size) for first, size in zip(box.start, box.shape, strict=True))
            full[part] = self._view(number, each, dtype)
        return full

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def _view(self, number: int, each: Slice, dtype: torch.dtype) -> torch.Tensor:
        return self._parcels[number][each.offset : each.offset + each.num_bytes].view(dtype).view(each.box.shape)
