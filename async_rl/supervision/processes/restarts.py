"""Pure: what to do when a child process has ended."""

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
        BufferUnreachable,  # it was waited for already, as long as redis.connect_timeout_s says
        Diverged,
        FailureBudgetSpent,
        RestartLimit,
        IntruderPackage,
    )
)
"""Another attempt would end the same way, so these are never restarted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """At most `limit` restarts within `window_s`, the n-th of them after `backoff_s` x 2^(n-1).

    A process without a sign of life for `silence_s` is killed, which counts as any other crash.
    """

    limit: int = 3
    window_s: float = 300.0
    backoff_s: float = 0.5
    silence_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """It ended well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    after_s: float
    counts: bool = True
    """Among the restarts that a process has within its window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    exit_code: int
    reason: str


def decide(exit_code: int, *, restarts: Sequence[float], now: float, policy: RestartPolicy) -> Finish | Restart | GiveUp:
    """`exit_code` is negative for a signal, as asyncio reports it; `restarts` are the times of earlier ones."""
    if exit_code == 0:
        return Finish()
    if exit_code == EnvironmentBlocked.exit_code:  # it was recorded which one: the next worker leaves that one alone
        return Restart(after_s=0.0, counts=False)
    if exit_code in FATAL_EXIT_CODES:
        return GiveUp(exit_code=exit_code, reason="which no restart would change")
    recent = [moment for moment in restarts if now - moment <= policy.window_s]
    if len(recent) >= policy.limit:
        reason = f"after {len(recent)} restarts within {policy.window_s:g} s"
        return GiveUp(exit_code=RestartLimit.exit_code, reason=reason)
    return Restart(after_s=policy.backoff_s * 2 ** len(recent))
