"""Counts where the host would wait for a GPU, on a CPU: reads of tensors that would lie on the device.

with DeviceReads(roots) as reads:     # a tensor computed from one of these lies on the device too
    engine.step()
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {
    "tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "nonzero", "unique",
    "masked_select", "repeat_interleave", "bincount",
}  # fmt: skip


class DeviceReads:
    def __init__(self, roots: Iterable[Tensor]) -> None:
        self.places: list[str] = []
        """The function and the line that read."""
        self._kept: list[Tensor] = []
        """Keeps memory of the device from being used again for tensors of the host."""
        self._memory: set[int] = set()
        self.add(roots)

    def __enter__(self) -> Self:
        self._modes = ExitStack()
        self._modes.enter_context(_Calls(self))
        self._modes.enter_context(_Operations(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._modes.close()

    def add(self, tensors: Iterable[Tensor]) -> None:
        for each in tensors:
            self._kept.append(each)
            self._memory.add(each.untyped_storage().data_ptr())

    def holds(self, values: object) -> bool:
        return any(each.numel() and each.untyped_storage().data_ptr() in self._memory for each in _tensors(values))


def _tensors(values: object) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


class _Calls(TorchFunctionMode):
    """Sees what Python calls."""

    def __init__(self, reads: DeviceReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        indexes = args[1] if name in ("__getitem__", "__setitem__") else ()
        masks = any(each.dtype is torch.bool for each in _tensors(indexes))
        is_told = kwargs is not None and "output_size" in kwargs  # then repeat_interleave does not count
        if ((name in READS and not is_told) or masks) and self._reads.holds(args):
            self._reads.places.append(f"{name} in {_caller()}")
        return func(*args, **(kwargs if kwargs is not None else {}))


class _Operations(TorchDispatchMode):
    """Sees which tensors are computed from tensors of the device."""

    def __init__(self, reads: DeviceReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs if kwargs is not None else {}
        out = func(*args, **given)
        if self._reads.holds((args, given)):
            self._reads.add(_tensors(out))
        return out


def _caller() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
