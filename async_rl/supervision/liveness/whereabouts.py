"""Where a thread stands at the moment: the line of a person's code that holds it up."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

Author = Literal["person", "package", "ours", "python"]

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


def frame_of_thread(ident: int) -> FrameType | None:
    """The innermost one; None once the thread has ended."""
    return sys._current_frames().get(ident)  # pyright: ignore[reportPrivateUsage]


def location_of(frame: FrameType | None) -> CodeLocation | None:
    """The innermost line that a person wrote: a blocking request is seen where it is made, not inside of its library.

    Where no frame is a person's, one of an installed package counts, then one of ours, then one of Python itself.
    """
    innermost: dict[Author, FrameType] = {}
    for each in _outwards(frame):
        innermost.setdefault(_author(each.f_code.co_filename), each)
    for author in ("person", "package", "ours", "python"):
        if (found := innermost.get(author)) is not None:
            return CodeLocation(file=found.f_code.co_filename, line=found.f_lineno, function=found.f_code.co_name)
    return None


def is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported: what a library does when it is first used happens once in a process."""
    return any(each.f_code.co_filename.startswith("<frozen importlib") for each in _outwards(frame))


def is_in_package(frame: FrameType | None) -> bool:
    """Whether an installed package is at work there, perhaps by means of Python's library."""
    authors = (_author(each.f_code.co_filename) for each in _outwards(frame))
    return next((author for author in authors if author != "python"), None) == "package"


def _author(file: str) -> Author:
    if file.startswith(_OURS):
        return "ours"
    if file.startswith(_PACKAGES):  # a folder of Python's library
        return "package"
    return "python" if file.startswith(_PYTHON) else "person"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
