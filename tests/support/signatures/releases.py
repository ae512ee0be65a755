"""Reads sources of released packages through pip, fetching of a wheel no more than the files that are asked for.

pip finds the wheels, with its own configuration, and reads parts of them as it does for metadata (`fast-deps`). What was read
is kept in a folder. Nothing is imported or built.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from tests.support.signatures.reading import Read

RELEASES = {
    "torch": ("2.11.0", "2.12.1", "2.13.0"),
    "megatron-core": ("0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "transformer-engine": ("2.11.0", "2.20.2"),
}
"""The last of every minor release that pyproject.toml allows; of Transformer Engine those that the extra `gpu` installs."""
DISTRIBUTIONS = {"torch": "torch", "megatron": "megatron-core", "transformer_engine": "transformer-engine"}
"""The distribution that has a package."""
PLATFORM = ("--python-version=3.12", "--platform=manylinux_2_28_x86_64", "--only-binary=:all:")
"""Every release has wheels for it."""
TRANSFORMER_ENGINE_BESIDE = {"0.16.1": "2.11.0", "0.19.2": "2.20.2"}
"""The Transformer Engine that the extra `gpu` installs beside a megatron-core."""


def reader(distribution: str, version: str, folder: Path) -> Read:
    """Return a function that reads a file of a release, by its path in the installed package."""
    wheel = cache(lambda: _wheel(distribution, version))

    def read(path: str) -> str | None:
        kept = folder / f"{distribution}-{version}" / path
        if not kept.is_file():
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(wheel().read(path) if path in wheel().NameToInfo else b"")
        return kept.read_text() or None  # an empty one says as little as one that is not there

    return read


def _wheel(distribution: str, version: str) -> ZipFile:
    from pip._internal.cli.cmdoptions import make_target_python
    from pip._internal.commands.download import DownloadCommand
    from pip._internal.network.lazy_wheel import LazyZipOverHTTP

    command: Any = DownloadCommand("download", "")
    options, _ = command.parse_args(list(PLATFORM))
    with command.main_context():
        session = command.get_default_session(options)
        target = make_target_python(options)
        finder = command._build_package_finder(options=options, session=session, target_python=target)
        links = [each.link for each in finder.find_all_candidates(distribution) if str(each.version) == version]
    url = next(link.url for link in links if link.is_wheel and link.scheme.startswith("http"))
    return ZipFile(LazyZipOverHTTP(url, session))  # pyright: ignore[reportArgumentType, reportCallIssue]  # it has what is called
