"""Runs one check in this process and writes its result, after every figure, as JSON."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OURS = {"async_rl", "buffer", "learner", "rollout_workers", "gpu_checks", "gpu_bench_parts", "weights_parts"}
LAST_LINES = 30


class Skipped(Exception):
    """The check cannot run here; the message says why."""


def begin(arguments: tuple[str, str, str, str], log: str, variables: Mapping[str, str], is_warm: bool) -> None:
    """Become the process of a check: a group of its own whose output goes to a file. Target of a fork."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(variables)
    if not is_warm or _lost_the_gpu():
        os.execve(sys.executable, [sys.executable, "-m", "gpu_checks", *arguments], {**variables})
    sys.exit(main(*arguments))


def _lost_the_gpu() -> bool:
    """Whether there is a GPU that this fork cannot use, because the process that it was forked from has used it."""
    warm, torch = sys.modules.get("gpu_checks.warm"), sys.modules.get("torch")
    if torch is None or not getattr(warm, "HAS_GPU", False):
        return False
    if torch.cuda._is_in_bad_fork():
        return True
    try:
        torch.cuda.init()
    except RuntimeError:
        return True
    return False


def main(module: str, name: str, device: str, result: str) -> int:
    found: dict[str, Any] = {"outcome": "failed", "reason": "its process ended early", "figures": {}}
    path = Path(result)
    try:
        _run(module, name, device, found, path)
        found |= {"outcome": "ok", "reason": ""}
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in OURS:
            _fail(found, error)
        else:
            found |= {"outcome": "skipped", "reason": f"{error.name} is not installed"}
    except Skipped as reason:
        found |= {"outcome": "skipped", "reason": str(reason)}
    except Exception as error:
        _fail(found, error)
    write(path, found)
    return int(found["outcome"] == "failed")


def _run(module: str, name: str, device: str, found: dict[str, Any], path: Path) -> None:
    check = importlib.import_module(module).CHECKS[name]
    from async_rl.megatron import parallel
    from gpu_checks.report import Machine, Report

    report = Report(figures=found["figures"], on_figure=lambda: write(path, found))
    check(Machine(device=parallel.resolve_device(device)), report)  # pyright: ignore[reportArgumentType]


def _fail(found: dict[str, Any], error: Exception) -> None:
    lines = "".join(traceback.format_exception(error)).splitlines()
    found |= {"outcome": "failed", "reason": f"{type(error).__name__}: {error}", "traceback": "\n".join(lines[-LAST_LINES:])}


def write(path: Path, found: Mapping[str, Any]) -> None:
    """Replace the file at once: whoever reads it at any moment finds it whole."""
    whole = path.with_name(path.name + ".new")
    whole.write_text(json.dumps(found, indent=2) + "\n")
    whole.replace(path)
