"""TensorBoard sink."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard.writer import SummaryWriter


class TensorBoardSink:
    def __init__(self, folder: Path, *, resumed_after: int) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=resumed_after + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)  # pyright: ignore[reportUnknownMemberType]

    def close(self) -> None:
        self._writer.close()
