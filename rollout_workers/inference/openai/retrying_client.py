"""Send JSON requests to a server that may be busy or down: retries with growing pauses, within a budget."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from async_rl.config.evaluation import OpenAIPolicy
from async_rl.config.exposure import read_token

CONNECT_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
BUSY = frozenset({408, 429, 500, 502, 503, 504})
"""Status codes that are retried."""


class ServerUnavailable(Exception):
    """The server stayed busy or unreachable for all allowed attempts."""


class ServerRefusal(Exception):
    """The server refused the request; a retry would not help."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(f"it answered {status}: {message}")
        self.status = status
        self.code = code
        """OpenAI's code of the reason; empty when the server gives none."""


class RetryBudget:
    """Limit retries over all calls: each success earns a fraction of one, so that a server that is down is not overloaded."""

    def __init__(self, *, earned: float = 0.2, most: float = 50.0) -> None:
        self._earned, self._most, self._left = earned, most, most

    def succeeded(self) -> None:
        self._left = min(self._most, self._left + self._earned)

    def spend(self) -> bool:
        """Use up one retry; return False if none is left."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


def pause_s(attempt: int, asked: float, chance: random.Random) -> float:
    """Seconds before the next attempt: the server's Retry-After, or a random part of a doubling time, so that not all
    callers retry at once.
    """
    return max(asked, chance.uniform(0.5, 1.0) * min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt))


class RetryingClient:
    def __init__(self, session: aiohttp.ClientSession, config: OpenAIPolicy) -> None:
        self.url = config.url.rstrip("/")
        self._session = session
        self._attempts, self._timeout_s = config.attempts, config.timeout_s
        self._budget = RetryBudget()
        self._chance = random.Random()

    @classmethod
    @asynccontextmanager
    async def open(cls, config: OpenAIPolicy) -> AsyncGenerator[RetryingClient]:
        key = read_token(config.api_key_file, key="api_key_file")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connections = aiohttp.TCPConnector(limit=config.max_in_flight)
        # The deadline below covers all attempts, including the wait for a free connection.
        patience = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with aiohttp.ClientSession(connector=connections, headers=headers, timeout=patience) as session:
            yield cls(session, config)

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """GET without a body, else POST.

        Raises ServerRefusal, ServerUnavailable, or TimeoutError when all attempts together took too long.
        """
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                return await self._attempt_until_answered("GET" if body is None else "POST", path, body)
        except TimeoutError:
            if deadline.expired():
                raise TimeoutError(f"{self.url}{path} gave no answer within {self._timeout_s:g} s") from None
            raise

    async def _attempt_until_answered(self, method: str, path: str, body: Mapping[str, Any] | None) -> Mapping[str, Any]:
        attempt = 0
        while True:
            asked_s = 0.0
            try:
                async with self._session.request(method, f"{self.url}{path}", json=body) as response:
                    if response.status not in BUSY:
                        answer = await _read(response)
                        self._budget.succeeded()
                        return answer
                    asked_s = _retry_after_s(response.headers)
                    reason = f"answered {response.status}"
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                reason = f"cannot be reached ({error or type(error).__name__})"
            attempt += 1
            if attempt >= self._attempts or not self._budget.spend():
                raise ServerUnavailable(f"{self.url}{path} {reason}, at the last of {attempt} attempts")
            await asyncio.sleep(pause_s(attempt, asked_s, self._chance))


async def _read(response: aiohttp.ClientResponse) -> Mapping[str, Any]:
    try:
        content = await response.json(content_type=None)
    except ValueError:
        content = None
    if response.status >= 400:
        error = content.get("error", content) if isinstance(content, dict) else None
        details: dict[str, Any] = error if isinstance(error, dict) else {}
        raise ServerRefusal(response.status, str(details.get("message", response.reason)), str(details.get("code") or ""))
    if not isinstance(content, dict):
        raise ServerRefusal(response.status, "something that is not a JSON object", "")
    return content


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """The Retry-After header in seconds. A date, which model servers do not send, counts as unset."""
    said = headers.get("Retry-After", "")
    return min(float(said), LONGEST_PAUSE_S) if said.replace(".", "", 1).isdecimal() else 0.0
