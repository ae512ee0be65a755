"""What a run writes is its owner's alone: rollouts, weights, logs and passwords lie in it."""

from __future__ import annotations

import os
from pathlib import Path


def keep_files_private() -> None:
    """From here on, this process and those that it starts make files of mode 0600 and folders of mode 0700."""
    os.umask(0o077)


def make_private_folder(folder: Path) -> None:
    """Also where it was there before, if it is ours."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_mode & 0o077 and found.st_uid == os.getuid():
        folder.chmod(0o700)
