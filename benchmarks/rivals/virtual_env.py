"""Virtual environments of the rivals, created on first use, so that their dependencies do not constrain ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RIVALS = Path(__file__).parent
ENVIRONMENTS = RIVALS.parents[1] / ".venvs"


def python_of(rival: str) -> Path:
    """Return the interpreter with `<rival>_requirements.txt` installed; the first call installs them."""
    requirements = RIVALS / f"{rival}_requirements.txt"
    folder = ENVIRONMENTS / rival
    python = folder / "bin" / "python"
    installed = folder / "installed_requirements.txt"
    if installed.exists() and installed.read_text() == requirements.read_text():
        return python
    print(f"installing {rival} into {folder} ...", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--requirement", requirements], check=True, stdout=sys.stderr)
    installed.write_text(requirements.read_text())  # last, so that an interrupted installation is repeated
    return python
