"""A grader process: `python -m rollout_workers.graders.process`. Executes one call after the other on its main thread."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from async_rl.supervision.processes.piped_process import ChildPipe, encode
from async_rl.supervision.processes.process_tree import children_of
from rollout_workers.episodes.rewards import Score


def main() -> None:
    pipe = ChildPipe()
    while True:
        try:
            request = pipe.receive()
        except EOFError:
            return
        pipe.send(_answer(pipe, request))


def _answer(pipe: ChildPipe, request: dict[str, Any]) -> dict[str, Any]:
    try:
        sys.path[:] = request["path"]  # the worker's, so that the same modules can be imported
        function = _find(request["function"])
        pipe.send("ready")
        answer = _encoded(function(*request["arguments"]))
        encode(answer)
    except (Exception, SystemExit) as error:
        answer = {"error": _described(error)}
    return {**answer, "left_behind": len(children_of(os.getpid()))}


def _encoded(result: Any) -> dict[str, Any]:
    if isinstance(result, Score):
        return {
            "score": {"reward": _plain(result.reward), "parts": {name: _plain(part) for name, part in result.parts.items()}}
        }
    return {"result": _plain(result)}


def _plain(result: Any) -> Any:
    return result.item() if hasattr(result, "item") else result  # a numpy scalar


def _described(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {error} ({Path(frames[-1].filename).name}:{frames[-1].lineno})"


@functools.cache
def _find(reference: str) -> Callable[..., Any]:
    module, _, name = reference.rpartition(":")
    found: Any = _load_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"async_rl_grader_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
