"""The root of the repository, and modules of `tests/` as processes of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def module_command(name: str, *arguments: object) -> list[str]:
    """Return the command that runs a module of `tests/`, given its full name."""
    return [sys.executable, "-P", "-m", name, *map(str, arguments)]


def module_environment(**more: str) -> dict[str, str]:
    """Return an environment in which `tests` can be imported, whatever the working folder is."""
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"} | more
