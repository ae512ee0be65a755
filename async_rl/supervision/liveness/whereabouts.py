"""Locates the code that a thread is executing, preferably the user's own line."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

Author = Literal["user", "package", "ours", "python"]

_HERE = Path(__file__).resolve().parents[3]
_OURS = tuple(f"{_HERE / name}/" for name in ("async_rl", "buffer", "learner", "rollout_workers"))
_PACKAGES = tuple({sysconfig.get_path("purelib") + "/", sysconfig.get_path("platlib") + "/"})
_PYTHON = (sysconfig.get_path("stdlib") + "/", "<frozen ")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeLocation:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """`file.py:12 in reward`"""
        return f"{Path(self.file).name}:{self.line} in {self.function}"

    @property
    def with_path(self) -> str:
        """`/path/to/file.py:12 in reward`"""
        return f"{self.file}:{self.line} in {self.function}"


def frame_of_thread(ident: int) -> FrameType | None:
    """The innermost frame of a thread; None if it has ended."""
    return sys._current_frames().get(ident)  # pyright: ignore[reportPrivateUsage]


def location_of(frame: FrameType | None) -> CodeLocation | None:
    """The innermost line of user code, so that a blocking request is located where it is made and not inside its library.

    Without user code in the stack: the innermost line of an installed package, else of this project, else of Python.
    """
    innermost: dict[Author, FrameType] = {}
    for each in _outwards(frame):
        innermost.setdefault(_author(each.f_code.co_filename), each)
    for author in ("user", "package", "ours", "python"):
        if (found := innermost.get(author)) is not None:
            return CodeLocation(file=found.f_code.co_filename, line=found.f_lineno, function=found.f_code.co_name)
    return None


def is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported, which happens only once per process."""
    return any(each.f_code.co_filename.startswith("<frozen importlib") for each in _outwards(frame))


def is_in_package(frame: FrameType | None) -> bool:
    """Whether an installed package is executing, directly or through the standard library."""
    authors = (_author(each.f_code.co_filename) for each in _outwards(frame))
    return next((author for author in authors if author != "python"), None) == "package"


def _author(file: str) -> Author:
    if file.startswith(_OURS):
        return "ours"
    if file.startswith(_PACKAGES):  # checked first: it lies inside the standard library's folder
        return "package"
    return "python" if file.startswith(_PYTHON) else "user"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
