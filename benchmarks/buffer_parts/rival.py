"""Runs a rival of the round trip: a script in rivals/, in its own virtual environment if it needs one."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rivals import virtual_env

from buffer_parts.server import server

PATIENCE_S = 180.0
"""Time limit of a rival for one round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    name: str
    script: str
    environment: str | None
    """Name of its requirements file in rivals/; None if it needs only what the project needs."""
    needs_redis: bool = False
    share: int = 1
    """It gets one of this many of our groups, enough for a second or two."""


RIVALS = (
    Rival(name="reverb", script="reverb_queue.py", environment="reverb"),
    Rival(name="pickle_stream", script="pickle_stream.py", environment=None, needs_redis=True, share=4),
    Rival(name="ray_queue", script="ray_queue.py", environment="ray", share=4),
)


class Absent(Exception):
    """A rival that cannot be measured here, with the reason."""


def rival_per_s(rival: Rival, tokens: int, groups: int) -> float:
    with ExitStack() as stack:
        where = stack.enter_context(server()) if rival.needs_redis else ""
        flags = [f"--tokens={tokens}", f"--groups={groups}", f"--where={where}"]
        command = [_python(rival), virtual_env.RIVALS / rival.script, *flags]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
        except subprocess.TimeoutExpired:
            raise Absent(f"{rival.name} did not end within {PATIENCE_S:g} s") from None
        except subprocess.CalledProcessError as error:
            raise Absent(f"{rival.name} failed: {_last_line(error.stderr)}") from None
    return json.loads(_last_line(run.stdout))["per_s"]


def _python(rival: Rival) -> Path:
    if rival.environment is None:
        return Path(sys.executable)
    try:
        return virtual_env.python_of(rival.environment)
    except subprocess.CalledProcessError as error:
        raise Absent(f"{rival.name} cannot be installed here: pip ended with code {error.returncode}") from None


def _last_line(output: str) -> str:
    return output.strip().rpartition("\n")[2]
