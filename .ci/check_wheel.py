"""Check that the installed wheel holds every file of the repository and works from an empty folder without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("async_rl", "buffer", "learner", "rollout_workers")
DATA = {"configs": "async_rl/configs"}
"""Folders of the checkout that are elsewhere in the wheel."""

IMPORTS = f"""
import importlib, pathlib, sys
for name in {PACKAGES}:
    found = pathlib.Path(importlib.import_module(name).__file__)
    assert found.is_relative_to(sys.argv[1]), f"{{name}} came from {{found}}"
"""


def main() -> None:
    site = Path(sys.argv[1]).resolve()
    checkout = Path.cwd()
    missing = [file for file in sorted(expected(checkout)) if not (site / file).is_file()]
    if missing:
        sys.exit("not in the wheel: " + ", ".join(missing))
    with tempfile.TemporaryDirectory() as empty:
        environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
        for line in (
            [sys.executable, "-P", "-W", "error", "-c", IMPORTS, str(site)],
            [sys.executable, "-P", str(site / "bin" / "async-rl"), "--version"],
            [sys.executable, "-P", str(site / "bin" / "async-rl"), "config", "check", "@", "configs/quickstart.yaml"],
        ):
            subprocess.run(line, cwd=empty, env=environment, check=True)


def expected(checkout: Path) -> set[str]:
    code = {
        str(path.relative_to(checkout))
        for package in PACKAGES
        for path in (checkout / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    data = {
        f"{place}/{path.relative_to(checkout / folder)}"
        for folder, place in DATA.items()
        for path in (checkout / folder).rglob("*.yaml")
    }
    return code | data


if __name__ == "__main__":
    main()
