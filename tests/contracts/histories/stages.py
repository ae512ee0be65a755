"""Where the state machine tests run: in memory or on a server, with a clock that moves only when told to.

A server can also be set back to an earlier state, as by a failover or a restored backup.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from redis.asyncio import Redis

from async_rl.replay_protocol import Limits, ReplayBuffer
from buffer import keys
from buffer.redis_buffer import RedisBuffer
from buffer.reference.memory_buffer import MemoryBuffer
from buffer.rules.limits_text import read_limits
from buffer.server.client import Server
from tests.support.manual_clock import ManualClock

T = TypeVar("T")
Copy = Mapping[bytes, bytes]
"""The keys of a run, as the server dumps them."""
LEARNER_LEASE_S = 0.001
"""A short learner lease, so that a successor need not wait."""

_SHIFT = """
local noted, shift = tonumber(ARGV[1]), tonumber(ARGV[2])
for index = 1, 2 do
  local found = redis.call('ZRANGE', KEYS[index], 0, -1, 'WITHSCORES')
  for place = 1, #found, 2 do
    local since = math.floor((tonumber(found[place + 1]) - noted) / 1000) * 1000
    redis.call('ZADD', KEYS[index], noted + since + shift, found[place])
  end
end
if redis.call('HEXISTS', KEYS[3], 'expires') == 1 then redis.call('HINCRBY', KEYS[3], 'expires', shift) end
"""


class Stage(Protocol):
    """One run of the buffer, with control over its clock and its server."""

    @property
    def buffer(self) -> ReplayBuffer: ...

    def do(self, call: Coroutine[Any, Any, T]) -> T: ...

    def pass_time(self, seconds: float) -> None: ...

    def limits(self, otherwise: Limits) -> Limits:
        """Return the limits in force; a server that was set back has lost later changes."""
        ...

    def copy(self) -> Copy | None:
        """Return a snapshot to set back to; None where that is not possible."""
        ...

    def put_back(self, copy: Copy) -> None: ...

    def close(self) -> None: ...


class MemoryStage:
    def __init__(self) -> None:
        self._clock = ManualClock()
        self._runner = asyncio.Runner()
        self.buffer = MemoryBuffer(self._clock.now, learner_lease_s=LEARNER_LEASE_S)

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(call)

    def pass_time(self, seconds: float) -> None:
        self._clock.advance(seconds)

    def limits(self, otherwise: Limits) -> Limits:
        return otherwise

    def copy(self) -> Copy | None:
        return None

    def put_back(self, copy: Copy) -> None:
        raise NotImplementedError("memory is not set back")

    def close(self) -> None:
        self._runner.close()


class ServerStage:
    def __init__(self, url: str, run: str) -> None:
        self._runner = asyncio.Runner()
        self._server, self._raw = self.do(self._connected(url))
        self.buffer = RedisBuffer(self._server, run, learner_lease_s=LEARNER_LEASE_S)
        self._state = keys.key(run, "state")
        self._moments = [keys.key(run, "leases"), keys.key(run, "asked"), keys.key(run, "learner")]
        self._names = [keys.key(run, name).encode() for name in keys.KINDS]
        self._noted_ms = self._now_ms()

    async def _connected(self, url: str) -> tuple[Server, Any]:
        return Server(url, patience_s=30), Redis.from_url(url)

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(call)

    def pass_time(self, seconds: float) -> None:
        """Move every time stored on the server into the past, in whole seconds, correcting for the real time that passed."""
        now_ms = self._now_ms()
        self.do(self._raw.eval(_SHIFT, 3, *self._moments, self._noted_ms, now_ms - self._noted_ms - round(seconds * 1000)))
        self._noted_ms = now_ms

    def _now_ms(self) -> int:
        seconds, microseconds = self.do(self._raw.time())
        return seconds * 1000 + microseconds // 1000

    def limits(self, otherwise: Limits) -> Limits:
        state = self.do(self._raw.hgetall(self._state))
        found = read_limits({name.decode(): value.decode() for name, value in state.items()})
        return replace(found, lease_s=otherwise.lease_s) if found is not None else otherwise

    def copy(self) -> Copy | None:
        values = self.do(self._each("dump"))
        return {name: value for name, value in zip(self._names, values, strict=True) if value is not None}

    async def _each(self, command: str) -> list[Any]:
        pipeline: Any = self._raw.pipeline(transaction=True)
        for name in self._names:
            getattr(pipeline, command)(name)
        return await pipeline.execute()

    def put_back(self, copy: Copy) -> None:
        self.do(self._replace(copy))

    async def _replace(self, copy: Copy) -> None:
        pipeline: Any = self._raw.pipeline(transaction=True)
        pipeline.delete(*self._names)
        for name, value in copy.items():
            pipeline.restore(name, 0, value)
        await pipeline.execute()

    def close(self) -> None:
        self.put_back({})
        self.do(self._raw.aclose())
        self.do(self._server.close())
        self._runner.close()
