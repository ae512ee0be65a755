"""Events that the processes of a trial report to the stage: lines of JSON on a shared pipe."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FACTS = 3
"""The pipe's file descriptor, in every process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    at: float
    """On the machine's monotonic clock, which all processes share."""
    who: str
    what: str
    more: Mapping[str, Any]

    @staticmethod
    def of(line: str) -> Fact:
        at, who, what, more = json.loads(line)
        return Fact(at=at, who=who, what=what, more=more)


def tell(who: str, what: str, **more: Any) -> None:
    """One write below the size that a pipe accepts atomically: a process killed meanwhile has reported all or nothing."""
    os.write(FACTS, (json.dumps([time.monotonic(), who, what, more]) + "\n").encode())
