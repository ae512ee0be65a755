"""References to user code in a configuration: `package.module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from async_rl.errors import ConfigError


def load_reference(reference: str) -> Any:
    """Import what the reference names. Raises ConfigError, also for anything that the user's module raises on import."""
    module_name, _, attribute = reference.rpartition(":")
    module = _load_file(Path(module_name)) if module_name.endswith(".py") else _load_module(module_name)
    if not hasattr(module, attribute):
        near = get_close_matches(attribute, vars(module), n=1)
        raise ConfigError(f"{module_name} has no {attribute!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    return getattr(module, attribute)


def absolute_reference(reference: str) -> str:
    """The reference with an absolute file path, valid from any working directory."""
    file, _, name = reference.rpartition(":")
    return f"{Path(file).absolute()}:{name}" if file.endswith(".py") else reference


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # importing runs code of the user's, which may raise anything
        raise ConfigError(
            f"module {name!r} cannot be imported ({type(error).__name__}: {error}); "
            "install it, put its folder on PYTHONPATH, or name the file: path/to/file.py:NAME"
        ) from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no file {path} in {Path.cwd()}")
    name = f"async_rl_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # as above
        raise ConfigError(f"{path} cannot be loaded ({type(error).__name__}: {error})") from error
    return module
