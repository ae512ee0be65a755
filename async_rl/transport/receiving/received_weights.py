"""A received version: its parcels as they were sent, read as full parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from async_rl.models.stored_weights import StoredWeights
from async_rl.transport.plan import Slice, WireLayout
from async_rl.transport.wire.shared_memory import MappedMemory, ParcelMemory


class ReceivedWeights(StoredWeights):
    """Most parameters are views of the parcels; those sent by several ranks are assembled on access."""

    def __init__(
        self,
        layout: WireLayout,
        parcels: Sequence[torch.Tensor],
        *,
        memories: Sequence[ParcelMemory | MappedMemory] = (),
        device: torch.device | None = None,
    ) -> None:
        """`parcels`: flat bytes, in the layout's order. `memories`: in which they are. `device`: where parameters are
        assembled; None: that of a parcel.
        """
        self.layout = layout
        self._memories = memories
        self._parcels = parcels
        self._device = device
        # Made here, while the engine samples: it waits for the swap, and a model of experts has thousands of parameters.
        self._whole = {
            name: self._view(*places[0], _dtype(layout, name))
            for name, places in layout.places.items()
            if len(places) == 1 and places[0][1].box.shape == layout.spec_of[name].shape
        }

    @property
    def addresses(self) -> Sequence[str]:
        """Paths under which processes of this machine open the parcels now; "" for one that they cannot."""
        return tuple(memory.own_address for memory in self._memories)

    @property
    def are_on_gpus(self) -> bool:
        return all(parcel.device.type == "cuda" for parcel in self._parcels)

    @property
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        return self.layout.sizes

    def __getitem__(self, name: str) -> torch.Tensor:
        if (whole := self._whole.get(name)) is not None:
            return whole
        spec, places = self.layout.spec_of[name], self.layout.places[name]
        dtype = _dtype(self.layout, name)
        device = self._device if self._device is not None else self._parcels[0].device
        full = torch.empty(spec.shape, dtype=dtype, device=device)
        for number, each in places:
            box = each.box
            part = tuple(slice(first, first + size) for first, size in zip(box.start, box.shape, strict=True))
            full[part] = self._view(number, each, dtype)
        return full

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.spec_of)

    def __len__(self) -> int:
        return len(self.layout.specs)

    def _view(self, number: int, each: Slice, dtype: torch.dtype) -> torch.Tensor:
        return self._parcels[number][each.offset : each.offset + each.num_bytes].view(dtype).view(each.box.shape)


def _dtype(layout: WireLayout, name: str) -> torch.dtype:
    return getattr(torch, layout.spec_of[name].dtype)
