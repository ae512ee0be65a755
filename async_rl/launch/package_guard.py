"""Detects other packages named `buffer` or `learner` that would be imported instead of ours."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import async_rl
from async_rl.errors import IntruderPackage

NAMES = ("async_rl", "buffer", "learner", "rollout_workers")


def guard() -> None:
    """Raise IntruderPackage unless all our packages are in one folder."""
    home = Path(async_rl.__file__).resolve().parent.parent
    for name in NAMES:
        found = _folder(name)
        if found is None:
            raise IntruderPackage(f"the package {name!r} is missing beside async_rl in {home}; install async-rl again")
        if found.parent != home:
            raise IntruderPackage(
                f"{found} is found before our own {name!r} in {home}; "
                f"rename it, or take {found.parent} out of PYTHONPATH and start from another folder"
            )


def _folder(name: str) -> Path | None:
    """What `import` would load: the folder of a package, or the file of a module."""
    spec = find_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations is not None:
        return next((Path(place).resolve() for place in spec.submodule_search_locations), None)
    return Path(spec.origin).resolve() if spec.origin is not None else None
