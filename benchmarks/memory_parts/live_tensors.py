"""Counts the bytes of live tensors, and runs a step on tensors without values."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

Moment = Literal["forward", "backward", "optimizer"]


class LiveTensors(TorchDispatchMode):
    """Counts the storages that are alive while inside. Memory that a kernel frees before it returns is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peaks: Counter[Moment] = Counter()
        self._known: dict[int, tuple[str, int]] = {}
        """Live storages: what made them, and their bytes."""
        self._at_peak: dict[int, tuple[str, int]] = {}
        self._has_gone_back = False

    def restart(self) -> None:
        """Begin another step."""
        self.peaks.clear()
        self._has_gone_back = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs if kwargs is not None else {}))
        for each in tree_flatten(made)[0]:
            if isinstance(each, Tensor):
                self._see(each, str(func))
        moment = self._moment()
        if self.live > self.peaks[moment]:
            is_highest = self.live > max(self.peaks.values(), default=0)
            self.peaks[moment] = self.live
            if is_highest:
                self._at_peak = dict(self._known)
        return made

    def largest_at_peak(self) -> list[tuple[str, int]]:
        """Return the bytes at the highest peak by the operation that made them and their shape, most first."""
        found: Counter[str] = Counter()
        for name, size in self._at_peak.values():
            found[name] += size
        return found.most_common()

    def _see(self, tensor: Tensor, maker: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known[key] = (f"{maker} {list(tensor.shape)} {str(tensor.dtype)[6:]}", size)
        self.live += size
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)[1]

    def _moment(self) -> Moment:
        if torch._C._current_autograd_node() is not None:  # pyright: ignore
            self._has_gone_back = True
            return "backward"
        return "optimizer" if self._has_gone_back else "forward"


class WithoutValues(TorchDispatchMode):
    """Runs a step on tensors without memory (FakeTensorMode), but integers, which say how rows are packed, keep their values.

    Enter it inside a FakeTensorMode. A number that is read from a tensor without values is 1.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs) if kwargs is not None else {}
        tensors = [each for each in tree_flatten((args, given))[0] if isinstance(each, Tensor)]
        if not any(isinstance(each, FakeTensor) for each in tensors) and (
            _are_small(tensors) or _makes_integers(func, args, given)
        ):
            with unset_fake_temporarily():
                return func(*args, **given)
        if func.namespace == "c10d":  # a single rank has nothing to reduce, but the caller waits for the result
            with unset_fake_temporarily():
                made = func(*tree_map_only(FakeTensor, lambda _: torch.zeros(1), args), **given)
            return (args[0], made[1]) if isinstance(made, tuple) else made
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1
        if func.overloadpacket in _NORMS:  # Megatron collects norms of gradients in a tensor made from numbers
            with unset_fake_temporarily():
                return torch.ones(())
        args, given = tree_map_only(Tensor, self._hidden, (args, given))
        made = func(*args, **given)
        # its weak references to new tensors would keep modules from being moved
        self._fake.fake_tensor_converter.meta_converter.tensor_memo.clear()
        return made

    def _hidden(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        with self._fake:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _are_small(tensors: Sequence[Tensor]) -> bool:
    """Whether the values are kept: integers, and a few numbers such as a step's totals."""
    return bool(tensors) and all(not each.is_floating_point() or each.numel() <= FEW for each in tensors)


FEW = 64
_NORMS = (torch.ops.aten.linalg_vector_norm, torch.ops.aten.norm)


def _makes_integers(func: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> bool:
    if (dtype := given.get("dtype")) is not None:
        return not dtype.is_floating_point
    return func.overloadpacket is torch.ops.aten.arange and all(isinstance(each, int) for each in args)
