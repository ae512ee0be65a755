"""Copies many tensors with few calls: a model has thousands of parameters, and each call costs a kernel and time in Python."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

_AT_ONCE = 1 << 28
"""Bytes of sources after which copying begins: a source, or what it is a view of, may be made for the copy alone."""


def copy_all(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy into each place its source, converting dtypes.

    On a GPU, tensors that agree in dtypes and are contiguous share kernels; the others have one each.
    """
    alike: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
    num_bytes = 0
    for place, source in copies:
        is_plain = place.is_contiguous() and source.is_contiguous() and place.device == source.device
        into, out_of = alike[place.dtype, source.dtype, is_plain]
        into.append(place)
        out_of.append(source)
        num_bytes += source.nbytes
        if num_bytes >= _AT_ONCE:
            _copy(alike.values())
            alike.clear()
            num_bytes = 0
            del place, source, into, out_of  # or the next source were made beside these
    _copy(alike.values())


def _copy(alike: Iterable[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> None:
    for places, sources in alike:
        torch._foreach_copy_(places, sources)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
