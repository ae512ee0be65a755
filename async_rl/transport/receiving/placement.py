"""Where a worker puts the parcels that it receives: its engine says which memory it reads fastest. Data only."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    devices: tuple[torch.device, ...]
    """They take parcels in turn: a learner of several ranks sends no GPU of several a whole model."""
    fetched_to: torch.device | None = None
    """Memory for parcels that cannot be read in place; None: the device's, as always over NCCL, which moves no other."""
    is_shared: bool = False
    """Whether other processes of the worker read the parcels too."""

    def device_of(self, parcel: int) -> torch.device:
        return self.devices[parcel % len(self.devices)]

    def memory_of(self, parcel: int) -> torch.device:
        """The memory for a parcel that is fetched otherwise than over NCCL."""
        return self.fetched_to if self.fetched_to is not None else self.device_of(parcel)
