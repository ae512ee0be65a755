"""Which interpreter `make` takes, also where pyenv's shims lie on the PATH."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.repository import ROOT

FIND = ROOT / ".ci" / "find_python"
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def find(folder: Path, *versions: str) -> subprocess.CompletedProcess[str]:
    """Search with nothing on the PATH but a shim that ends with an error, as pyenv's do for versions that are not chosen."""
    shims = folder / "shims"
    shims.mkdir()
    for version in versions:
        (shims / f"python{version}").write_text("#!/bin/sh\necho 'pyenv: command not found' >&2\nexit 127\n")
        (shims / f"python{version}").chmod(0o700)
    (shims / "bash").symlink_to("/bin/bash")
    places = {"PATH": str(shims), "PYENV_ROOT": str(folder / "pyenv"), "UV_PYTHON_INSTALL_DIR": str(folder / "uv")}
    return subprocess.run([FIND, *versions], env={**os.environ, **places}, capture_output=True, text=True, check=False)


def test_an_interpreter_of_pyenv_is_found_behind_a_shim_that_fails(tmp_path: Path) -> None:
    installed = tmp_path / "pyenv" / "versions" / f"{VERSION}.99" / "bin"
    installed.mkdir(parents=True)
    (installed / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (installed / "python").chmod(0o700)
    found = find(tmp_path, "3.98", VERSION)
    assert (found.returncode, found.stderr) == (0, "")
    assert Path(found.stdout.strip()) == Path(sys.executable)


def test_where_there_is_none_one_sentence_says_what_to_do(tmp_path: Path) -> None:
    found = find(tmp_path, "3.98")
    assert (found.returncode, found.stdout) == (1, "")
    (sentence,) = found.stderr.splitlines()
    assert "no Python 3.98" in sentence
    assert "make PYTHON=" in sentence
