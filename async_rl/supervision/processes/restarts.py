"""Decides, without I/O, what to do when a child process ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from async_rl.errors import (
    BufferUnreachable,
    CheckpointError,
    ConfigError,
    Diverged,
    EnvironmentBlocked,
    FailureBudgetSpent,
    FleetMismatch,
    IntruderPackage,
    LearnerAlreadyRunning,
    RestartLimit,
)

FATAL_EXIT_CODES = frozenset(
    kind.exit_code
    for kind in (
        CheckpointError,
        ConfigError,
        LearnerAlreadyRunning,
        FleetMismatch,
        BufferUnreachable,  # the process has waited for redis.connect_timeout_s already
        Diverged,
        FailureBudgetSpent,
        RestartLimit,
        IntruderPackage,
    )
)
"""Exit codes that are never restarted, because another attempt would end in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """At most `limit` restarts within `window_s`, the n-th of them after `backoff_s` x 2^(n-1).

    A process without a heartbeat for `silence_s` is killed, which counts as a crash.
    """

    limit: int = 3
    window_s: float = 300.0
    backoff_s: float = 0.5
    silence_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The process ended successfully."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    after_s: float
    counts: bool = True
    """Whether it counts towards the policy's limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    exit_code: int
    reason: str


def decide(
    exit_code: int, *, restarts: Sequence[float], now: float, policy: RestartPolicy, lost_machine: bool = False
) -> Finish | Restart | GiveUp:
    """Decide from the exit code (negative for a signal, as in asyncio), the times of earlier restarts, and whether the process
    was lost with its machine."""
    if exit_code == 0:
        return Finish()
    if lost_machine:
        return Restart(after_s=policy.backoff_s, counts=False)
    if exit_code == EnvironmentBlocked.exit_code:  # the environment is recorded; the next worker pauses it
        return Restart(after_s=0.0, counts=False)
    if exit_code in FATAL_EXIT_CODES:
        return GiveUp(exit_code=exit_code, reason="which no restart would change")
    recent = [moment for moment in restarts if now - moment <= policy.window_s]
    if len(recent) >= policy.limit:
        reason = f"after {len(recent)} restarts within {policy.window_s:g} s"
        return GiveUp(exit_code=RestartLimit.exit_code, reason=reason)
    return Restart(after_s=policy.backoff_s * 2 ** len(recent))
