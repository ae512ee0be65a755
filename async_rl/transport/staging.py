"""Where a version lands before it is served: a full set of parameters beside the live one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from async_rl.parameter_spec import ParameterSpec
from async_rl.transport.plan import Piece, Transfer


class Staging:
    """Tensors laid out as they travel: those that share a transfer share memory, so nothing is copied on arrival."""

    def __init__(self, specs: Sequence[ParameterSpec], transfers: Sequence[Transfer], device: torch.device) -> None:
        self.specs = tuple(specs)
        self.transfers = tuple(transfers)
        self._rows: dict[Transfer, torch.Tensor] = {}
        self._bytes: dict[str, torch.Tensor] = {}
        for transfer in transfers:
            if transfer.is_packed:
                self._lay_out(transfer, device)
        self.tensors: Mapping[str, torch.Tensor] = {spec.name: self._tensor(spec, device) for spec in specs}

    def row(self, transfer: Transfer) -> torch.Tensor:
        """The bytes that a transfer fills."""
        return self._rows[transfer] if transfer.is_packed else self.piece(transfer.pieces[0])

    def piece(self, piece: Piece) -> torch.Tensor:
        return self._bytes[piece.name][piece.start : piece.stop]

    def _lay_out(self, transfer: Transfer, device: torch.device) -> None:
        row = self._rows[transfer] = torch.empty(transfer.num_bytes, dtype=torch.uint8, device=device)
        for piece in transfer.pieces:
            self._bytes[piece.name] = row[piece.offset : piece.offset + piece.num_bytes]

    def _tensor(self, spec: ParameterSpec, device: torch.device) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if spec.name in self._bytes:
            return self._bytes[spec.name].view(dtype).view(spec.shape)
        tensor = torch.empty(spec.shape, dtype=dtype, device=device)
        self._bytes[spec.name] = tensor.reshape(-1).view(torch.uint8)
        return tensor
