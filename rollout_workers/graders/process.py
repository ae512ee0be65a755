"""A grader process: `python -m rollout_workers.graders.process`. Executes one call after the other on its main thread."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_rl.imports.references import load_reference
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
    """Import a function; unlike other references, it may be nested in a class."""
    module, _, name = reference.rpartition(":")
    outer, *inner = name.split(".")
    return functools.reduce(getattr, inner, load_reference(f"{module}:{outer}"))


if __name__ == "__main__":
    main()
