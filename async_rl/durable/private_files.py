"""File modes of a run's files, which contain rollouts, weights, logs and passwords: readable by the owner only."""

from __future__ import annotations

import os
from pathlib import Path


def keep_files_private() -> None:
    """Set the umask of this process and its children: files get mode 0600, folders 0700."""
    os.umask(0o077)


def make_private_folder(folder: Path) -> None:
    """Create a folder of mode 0700, or change the mode of an existing one that we own."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_mode & 0o077 and found.st_uid == os.getuid():
        folder.chmod(0o700)
