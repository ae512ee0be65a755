"""The shipped configurations and samples, found from any folder."""

from __future__ import annotations

from pathlib import Path

import async_rl


def shipped_configs() -> Path:
    """The folder of shipped configurations: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(async_rl.__file__).parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def own_or_shipped(path: Path) -> Path:
    """The path itself if it exists, else the shipped file: `configs/quickstart.yaml` works from any folder."""
    if path.exists() or path.is_absolute():
        return path
    parts = path.parts[1:] if path.parts[:1] == ("configs",) else path.parts
    shipped = shipped_configs().joinpath(*parts)
    return shipped if shipped.is_file() else path
