"""Import the public names of a package on first use, so that importing the package itself stays quick.

    __getattr__, __dir__ = lazy_names(__name__, __file__)

The names are those of the `from MODULE import NAME as NAME` lines in the package's stub, `__init__.pyi`, which type
checkers and editors read as well.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the module functions `__getattr__` and `__dir__` of a package from its stub."""
    modules = modules_of(Path(file).with_suffix(".pyi"))

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return find, names


def modules_of(stub: Path) -> Mapping[str, str]:
    """The module of each name that a stub imports."""
    lines = ast.parse(stub.read_text()).body
    return {
        alias.name: line.module
        for line in lines
        if isinstance(line, ast.ImportFrom) and line.module is not None
        for alias in line.names
    }
