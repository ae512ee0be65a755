"""Numbers of the host for the device, sent without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sent(numbers: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """From pinned memory, because a copy from any other would wait for all that the device has been told to do."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
