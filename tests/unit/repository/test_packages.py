"""Whose packages are imported, and what importing them costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.errors import IntruderPackage
from async_rl.launch.package_guard import NAMES, guard
from tests.support.waiting import PATIENCE_S


def python(*args: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, *args]
    return subprocess.run(
        line, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_our_packages_stand_together() -> None:
    guard()


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "package") for name in NAMES if name != "async_rl"), ("buffer", "module"), ("buffer", "folder")],
)
def test_an_intruder_is_named(tmp_path: Path, name: str, kind: str) -> None:
    if kind == "module":
        (tmp_path / f"{name}.py").touch()
    else:
        (tmp_path / name).mkdir()
        if kind == "package":
            (tmp_path / name / "__init__.py").touch()
    done = python("-P", "-m", "async_rl.cli.main", "--version", folder=tmp_path)
    assert done.returncode == 0, "in the working folder it does no harm"
    script = "from async_rl import errors; from async_rl.launch.package_guard import guard\nwith errors.boundary('t'): guard()"
    done = python("-P", "-c", script, folder=tmp_path, PYTHONPATH=str(tmp_path))
    if kind == "folder":  # a folder without __init__.py never wins over a package
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == IntruderPackage.exit_code
        assert f"{tmp_path / name}" in done.stderr
        assert "Traceback" not in done.stderr


def test_the_shared_words_cost_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys, async_rl, buffer, async_rl.cli.main, async_rl.config.loading, async_rl.supervision, async_rl.telemetry, "
        "async_rl.cli.run_summary, async_rl.models.shape, async_rl.types, async_rl.protocols\n"
        "heavy = {'torch', 'megatron', 'transformers', 'wandb', 'matplotlib', 'redis'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = python("-P", "-c", script, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_importing_megatron_says_nothing_and_loads_only_what_is_used(tmp_path: Path) -> None:
    """A CUDA build of torch looks for a GPU when Megatron imports it, and says with CUDA_HOME set that there is none."""
    script = (
        "import sys, learner.__main__, rollout_workers.__main__, torch\n"
        "unused = {'wandb'} if torch.cuda.is_available() else {'wandb', 'torch._dynamo', 'torch._inductor.compile_fx'}\n"
        "assert not unused & set(sys.modules), unused & set(sys.modules)\n"
        "import async_rl.megatron.host as host\n"
        "with host.importing():\n"
        "    pass\n"
        "assert torch.compile.__module__ == 'torch'\n"
        "import wandb\n"
    )
    done = python("-P", "-c", script, folder=tmp_path, CUDA_HOME=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
