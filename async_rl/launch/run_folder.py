"""Creates the folder of a run."""

from __future__ import annotations

import os
from pathlib import Path

from async_rl.durable.private_files import make_private_folder
from async_rl.errors import ConfigError


def make_run_folder(folder: Path) -> None:
    """Create the run's folder. Raises ConfigError if it cannot be created or written to."""
    try:
        make_private_folder(folder)
    except OSError as error:
        raise _refused(folder, error.strerror) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _refused(folder, "its permissions do not allow it")


def _refused(folder: Path, why: str | None) -> ConfigError:
    return ConfigError(f"the run's folder {folder} cannot be written in: {why}; choose another run.folder")
