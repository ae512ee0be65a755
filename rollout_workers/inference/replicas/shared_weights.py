"""How a version gets from a worker to the ranks of its engines: they open its parcels, which are in host memory or on GPUs.

worker                                       ranks
SharedWeights.describe ── SharedParcels ───▶ SharedVersion, called on a thread: full parameters
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from async_rl.errors import ServiceStopped
from async_rl.megatron import host
from async_rl.models.parameter_spec import ParameterSpec
from async_rl.transport.plan import Box, WireLayout, plan_layout
from async_rl.transport.receiving.received_weights import ReceivedWeights
from async_rl.transport.wire.shared_memory import MappedMemories, ParcelMemory
from rollout_workers.inference.replicas.frames import SharedParcels

log = structlog.get_logger("rollout_workers.inference")


class SharedWeights:
    """The worker's side."""

    def __init__(self, specs: Sequence[ParameterSpec]) -> None:
        self._specs = specs
        self._copy: ParcelMemory | None = None
        """For weights that other processes cannot open: those that were not received, or lie on a GPU and are not shared, or
        not any more, because the learner that packed them has ended.
        """

    def describe(self, tensors: Mapping[str, Tensor]) -> tuple[WireLayout, Sequence[str]]:
        """Layout and addresses of the parcels. Weights that other processes cannot open are copied first; blocks."""
        if isinstance(tensors, ReceivedWeights) and (addresses := tensors.addresses) and all(addresses):
            return tensors.layout, addresses
        layout = plan_layout(self._specs, {0: [Box.whole(spec) for spec in self._specs]})
        (parcel,) = layout.parcels
        if isinstance(tensors, ReceivedWeights) and tensors.are_on_gpus and self._copy is None:
            log.warning(
                "ranks cannot open what was received on GPUs, and read a copy in host memory; if no learner has just ended, "
                "wire.shared_memory: false saves its memory on the GPUs"
            )
        copy = self._copy if self._copy is not None else ParcelMemory(parcel.num_bytes, host.HOST, shared=True)
        if not copy.address:
            gb = parcel.num_bytes / 2**30
            raise ServiceStopped(f"the host has no room for {gb:.1f} GB of weights, which the ranks of engines read")
        self._copy = copy
        for name, place in ReceivedWeights(layout, [copy.data]).items():
            place.copy_(tensors[name])
        return layout, (copy.address,)

    def close(self) -> None:
        self._copy = None


class WeightReader:
    """A rank's side. Memories stay mapped from version to version."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gpus = torch.cuda.device_count() if device.type == "cuda" else 0
        self._mapped = MappedMemories(torch.device("cuda", number) for number in range(gpus))
        self._layout: WireLayout | None = None

    def open(self, told: SharedParcels) -> ReceivedWeights:
        """Open a version's parcels; one call at a time. Raises ServiceStopped when this process cannot."""
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
        are_on_gpus = all(parcel.is_cuda for parcel in parcels)
        return ReceivedWeights(self._layout, parcels, device=self._device if are_on_gpus else None)


@dataclass(frozen=True, slots=True)
class SharedVersion:
    """A version in its worker's memory, which a call opens."""

    told: SharedParcels
    reader: WeightReader

    def __call__(self) -> ReceivedWeights:
        return self.reader.open(self.told)
