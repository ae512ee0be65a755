"""How a version gets from a worker to the ranks of its engines: they open its parcels, which are in host memory or on GPUs.

worker                                       ranks
SharedWeights.describe ── SharedParcels ───▶ SharedVersion, called on a thread: full parameters
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from async_rl.errors import ServiceStopped
from async_rl.models.parameter_spec import ParameterSpec
from async_rl.transport.plan import Box, WireLayout, plan_layout
from async_rl.transport.receiving.received_weights import ReceivedWeights
from async_rl.transport.wire.shared_memory import MappedMemories, ParcelMemory
from rollout_workers.inference.replicas.frames import SharedParcels

_HOST = torch.device("cpu")


class SharedWeights:
    """The worker's side."""

    def __init__(self, specs: Sequence[ParameterSpec]) -> None:
        self._specs = specs
        self._copy: ParcelMemory | None = None
        """For weights that other processes cannot open: those that were not received, or lie on a GPU that is not shared."""

    def describe(self, tensors: Mapping[str, Tensor]) -> tuple[WireLayout, Sequence[str]]:
        """Layout and addresses of the parcels. Weights that other processes cannot open are copied first; blocks."""
        if isinstance(tensors, ReceivedWeights) and tensors.addresses and all(tensors.addresses):
            return tensors.layout, tensors.addresses
        layout = plan_layout(self._specs, {0: [Box.whole(spec) for spec in self._specs]})
        (parcel,) = layout.parcels
        if self._copy is None:
            self._copy = ParcelMemory(parcel.num_bytes, _HOST, shared=True)
            if not self._copy.address:
                gb = parcel.num_bytes / 2**30
                raise ServiceStopped(f"the host has no room for {gb:.1f} GB of weights, which the ranks of engines read")
        for name, place in ReceivedWeights(layout, [self._copy.data]).items():
            place.copy_(tensors[name])
        return layout, (self._copy.address,)

    def close(self) -> None:
        self._copy = None


class WeightReader:
    """A rank's side. Memories stay mapped from version to version."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gpus = torch.cuda.device_count() if device.type == "cuda" else 0
        self._mapped = MappedMemories(torch.device("cuda", number) for number in range(gpus))
        self._layout: WireLayout | None = None
        self._reading = Lock()

    def open(self, told: SharedParcels) -> ReceivedWeights:
        """Open a version's parcels. Raises ServiceStopped when this process cannot."""
        with self._reading:
            if told.layout:
                self._layout = WireLayout.from_json(told.layout)
            assert self._layout is not None, "the first version comes with its layout"
            self._mapped.drop_ended()
            parcels: list[Tensor] = []
            for address, parcel in zip(told.addresses, self._layout.parcels, strict=True):
                memory = self._mapped.open(address, parcel.num_bytes)
                if memory is None:
                    raise ServiceStopped(
                        f"a rank of an engine cannot open the weights that its worker received ({address}); with "
                        "wire.shared_memory: false they come to GPUs by way of host memory"
                    )
                parcels.append(memory.data)
            return ReceivedWeights(self._layout, parcels, device=self._device)


@dataclass(frozen=True, slots=True)
class SharedVersion:
    """A version in its worker's memory, which a call opens."""

    told: SharedParcels
    reader: WeightReader

    def __call__(self) -> ReceivedWeights:
        return self.reader.open(self.told)
