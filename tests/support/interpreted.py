"""Triton kernels interpreted on the CPU, in a process of their own: a process either compiles kernels or interprets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.made_once import made_once
from tests.support.repository import ROOT
from tests.support.waiting import PATIENCE_S


def interpreted(module: str) -> Any:
    """Run a module whose last line of output is JSON, and return that. Warnings are errors in it."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    # a warning of numpy's: lanes of an interpreted program compute, unlike a GPU's, where a mask keeps their result out
    quiet = ["-W", "error", "-W", "ignore:divide by zero:RuntimeWarning", "-W", "ignore:invalid value:RuntimeWarning"]
    done = subprocess.run(
        [sys.executable, *quiet, "-m", module], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def interpreted_once(factory: pytest.TempPathFactory, module: str) -> Any:
    """The same, for tests of several processes that read one report."""
    folder = made_once(factory, module, lambda folder: (folder / "report").write_text(json.dumps(interpreted(module))))
    return json.loads((folder / "report").read_text())
