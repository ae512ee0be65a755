"""Lets Megatron run without a GPU: replaces the parts of torch.cuda that it calls unconditionally.

`stand_in_for_cuda` replaces a dozen functions of `torch.cuda` once per process and has no cost afterwards. `on_host` is a
torch-function mode that redirects `device="cuda"`; it slows down every torch call, so it is entered only around calls that need
it: building a model, an optimizer or an inference context.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

HOST = torch.device("cpu")


def is_needed() -> bool:
    """Whether torch sees no GPU."""
    return not torch.cuda.is_available()


def _nothing(*_: object, **__: object) -> None: ...


class HostEvent:
    """A torch.cuda.Event that is complete at once."""

    def __init__(self, *_: object, **__: object) -> None:
        self._at = 0.0

    def record(self, *_: object) -> None:
        self._at = time.perf_counter()

    synchronize = wait = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: HostEvent) -> float:
        return (other._at - self._at) * 1e3


class HostStream:
    """A torch.cuda.Stream on which all work is complete at once."""

    def __init__(self, *_: object, **__: object) -> None: ...

    wait_stream = wait_event = synchronize = _nothing

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        return event if event is not None else HostEvent()


def _no_memory_stats(*_: object, **__: object) -> dict[str, int]:
    return {
        f"{kind}_bytes.all.{what}": 0
        for kind in ("allocated", "reserved")
        for what in ("current", "peak", "allocated", "freed")
    }


@contextmanager
def _no_stream(*_: object, **__: object) -> Iterator[None]:
    yield


def stand_in_for_cuda() -> None:
    """Replace the functions of torch.cuda that Megatron calls. Call it once per process; raises RuntimeError with a GPU."""
    if not is_needed():
        raise RuntimeError("torch sees a GPU: the stand-ins for torch.cuda would hide it")
    stream = HostStream()
    replacements: dict[str, Any] = {
        "current_device": lambda: HOST,
        "Event": HostEvent,
        "Stream": HostStream,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": _no_stream,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "memory_stats": _no_memory_stats,
        "mem_get_info": lambda *_: (0, 0),
    }
    for name, stand_in in replacements.items():
        setattr(torch.cuda, name, stand_in)
    torch.cuda.nvtx.range_push = _nothing
    torch.cuda.nvtx.range_pop = _nothing


class _OnHost(TorchFunctionMode):
    """Redirects CUDA devices to the CPU and ignores memory pinning."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs) if kwargs is not None else {}
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not given:
            # Megatron's optimizers sort parameters by the name of their CUDA tensor type.
            return func(*args).replace("torch.", "torch.cuda.")
        if _is_cuda(given.get("device")):
            given["device"] = HOST
        given.pop("pin_memory", None)
        if func is torch.Tensor.to:
            args = tuple(HOST if _is_cuda(argument) else argument for argument in args)
        return func(*args, **given)


def _is_cuda(place: object) -> bool:
    return isinstance(place, str | torch.device) and str(place).startswith("cuda")


@contextmanager
def on_host() -> Iterator[None]:
    """Redirect CUDA devices to the CPU while inside. Does nothing with a GPU."""
    if not is_needed():
        yield
        return
    with _OnHost():
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings of Megatron and torch while they are imported or configured: deprecations, missing extras, no GPU."""
    extensions = logging.getLogger("torch.utils.cpp_extension")  # warns without a GPU
    level = extensions.level
    extensions.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        extensions.setLevel(level)


@contextmanager
def importing() -> Iterator[None]:
    """Import Megatron inside this block: without warnings, wandb and, without a GPU, what is not used there.

    Importing what is left out takes longer than all the rest. Without a GPU, `torch.compile` returns functions unchanged, so
    that Megatron's decorated functions need no C++ compiler.
    """
    compiler = torch.compile
    unused: dict[str, ModuleType | None] = {"wandb": None}
    if is_needed():
        torch.compile = _as_it_is
        if _has_optional_checkpoints():
            unused |= _UNUSED_ON_HOST
    left_out = {name: module for name, module in unused.items() if name not in sys.modules}
    sys.modules.update(left_out)  # pyright: ignore[reportArgumentType, reportCallIssue]  # None makes an import fail
    try:
        with quiet():
            yield
    finally:
        torch.compile = compiler
        for name in left_out:
            del sys.modules[name]


def _has_optional_checkpoints() -> bool:
    """Whether Megatron can be imported without torch's distributed checkpoints, which import all that is in _UNUSED_ON_HOST."""
    return tuple(map(int, version("megatron-core").split(".")[:2])) < (0, 17)


def _checkpoints() -> ModuleType:
    """Stands in for the module, whose only name that Megatron always imports is not used."""
    module = ModuleType("torch.distributed.checkpoint")
    vars(module)["default_planner"] = None
    return module


_UNUSED_ON_HOST: dict[str, ModuleType | None] = {
    "megatron.core.distributed.fsdp.src.megatron_fsdp": None,
    "torch.distributed._tensor": None,
    "torch.distributed.checkpoint": _checkpoints(),
    "torch.distributed.fsdp": None,
    "torch.utils.tensorboard": None,
    "triton": None,
}


def _as_it_is(function: Callable[..., Any] | None = None, **_: object) -> Callable[..., Any]:
    return _as_it_is if function is None else function
