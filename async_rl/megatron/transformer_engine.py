"""Transformer Engine as Megatron gets to see it: hidden if it is installed and cannot be imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys

NAME = "transformer_engine"


def is_installed() -> bool:
    return importlib.util.find_spec(NAME) is not None


def hide_if_broken() -> str:
    """Import Transformer Engine and return why that fails, or "". Call it once, before Megatron is imported.

    Without its part for torch, or with libraries that do not fit, the package raises errors other than ImportError, which would
    end every import of Megatron; so Megatron gets an ImportError instead and does without.
    """
    if not is_installed():
        return ""
    try:
        importlib.import_module(f"{NAME}.pytorch")
    except Exception as error:
        for module in [name for name in sys.modules if name.partition(".")[0] == NAME]:
            del sys.modules[module]
        sys.modules[NAME] = None  # pyright: ignore[reportArgumentType]  # makes an import fail
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""
