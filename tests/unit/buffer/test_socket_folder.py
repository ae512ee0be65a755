"""A starting server removes abandoned socket folders from the temporary folder, and nothing else."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from buffer.server.embedded.socket_folder import SOCKET, socket_folder
from tests.support.private_server import private_folder

STARTS = 300
"""Of each of four servers, on folders that come and go."""


def _folder(root: Path, name: str) -> Path:
    made = root / f"async-rl-{name}"
    made.mkdir(mode=0o700)
    return made


def test_only_abandoned_socket_folders_are_removed():
    with private_folder() as root, socket.socket(socket.AF_UNIX) as server:
        served, abandoned, other = _folder(root, 16 * "a"), _folder(root, 16 * "b"), _folder(root, "k3x_9qzz")
        server.bind(str(served / SOCKET))
        server.listen()
        (abandoned / SOCKET).touch()
        with socket_folder(root / f"async-rl-{16 * 'c'}"), socket_folder(root / f"async-rl-{16 * 'd'}"):
            found = {path.name[9] for path in root.iterdir()}
        assert (served / SOCKET).exists(), "a server of an earlier release locks nothing, and still serves"
        assert other.exists(), "another temporary folder of ours"
        assert found == {"a", "c", "d", "k"}


def test_servers_that_start_at_once_do_not_remove_what_another_makes():
    def come_and_go(folder: Path) -> bool:
        for _ in range(STARTS):
            with socket_folder(folder):
                if not folder.exists():
                    return False
        return True

    with private_folder() as root, ThreadPoolExecutor(4) as threads:
        folders = [root / f"async-rl-{16 * name}" for name in "abcd"]
        assert all(threads.map(come_and_go, folders))
        assert list(root.iterdir()) == []
