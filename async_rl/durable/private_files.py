"""File modes of a run's files, which contain rollouts, weights, logs and passwords: readable by the owner only."""

from __future__ import annotations

import os


def keep_files_private() -> None:
    """Set the umask of this process and its children: files get mode 0600, folders 0700."""
    os.umask(0o077)
