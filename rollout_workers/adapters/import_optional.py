"""Import libraries that only some environments need."""

from __future__ import annotations

import importlib
from typing import Any

from async_rl.errors import ConfigError


def import_optional(module: str, *, install: str) -> Any:
    """Import a module. Raises ConfigError with `install`, its name for pip, if its package is missing."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ConfigError(
            f"the package {package!r} is not installed here: pip install '{install}', "
            "or serve this environment from a Python that has it (async-rl env serve)"
        ) from error
