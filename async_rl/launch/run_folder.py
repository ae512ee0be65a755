"""Creates the folder of a run."""

from __future__ import annotations

import os
from pathlib import Path

from async_rl.errors import ConfigError


def make_run_folder(folder: Path) -> None:
    """Create a folder of mode 0700, or change the mode of an existing one that we own. Raises ConfigError if it cannot be
    written to."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_mode & 0o077 and found.st_uid == os.getuid():
            folder.chmod(0o700)
    except OSError as error:
        raise _refused(folder, error.strerror) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _refused(folder, "its permissions do not allow it")


def _refused(folder: Path, why: str | None) -> ConfigError:
    return ConfigError(f"the run's folder {folder} cannot be written in: {why}; choose another run.folder")
