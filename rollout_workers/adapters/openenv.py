"""Environments of an OpenEnv server, over its WebSocket: one connection is one episode. OpenEnv is not imported.

{"type": "reset", "data": {"seed": 7}}  ─▶  {"type": "observation", "data": {"observation": {...}, "reward": ..., "done": ...}}
{"type": "step", "data": {...}}         ─▶  the same, or {"type": "error", "data": {"code": ..., "message": ...}}
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from pydantic import BaseModel, ValidationError

from async_rl.errors import ConfigError
from async_rl.types import Task
from rollout_workers.adapters.stepped import NoAction, SteppedAgent, WorldStep


class _Data(BaseModel):
    """The data of a response: an observation, or an error."""

    observation: dict[str, Any] = {}
    reward: float | None = None
    done: bool = False
    message: str = ""
    code: str = ""
    errors: tuple[dict[str, Any], ...] = ()


class _Response(BaseModel):
    type: str
    data: _Data


@dataclass(kw_only=True)
class OpenEnv(SteppedAgent):
    url: str
    """http://HOST:PORT of the server."""
    action: str = "message"
    """The field of an action that takes the answer. For actions of several fields, override `read` in a subclass."""
    observation: str = ""
    """The field of an observation that the model reads; unset means all of them, as JSON."""
    reset: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of its reset."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"environment {self.name!r}: url must begin with http:// or https://, got {self.url!r}")

    def tell(self, observation: Mapping[str, Any]) -> str:
        """Return the observation as text."""
        if not self.observation:
            return json.dumps(observation)
        if self.observation not in observation:
            known = ", ".join(observation)
            raise ValueError(f"the observations of {self.url} have no field {self.observation!r}; they have {known}")
        return str(observation[self.observation])

    def read(self, text: str) -> Mapping[str, Any]:
        """Return the action in an answer. Raises NoAction, whose message the model reads, if there is none."""
        return {self.action: text}

    @asynccontextmanager
    async def world(self, task: Task) -> AsyncGenerator[_OpenEnvWorld]:
        async with aiohttp.ClientSession() as http, http.ws_connect(f"{self.url.rstrip('/')}/ws") as socket:
            yield _OpenEnvWorld(self, socket, {"seed": int(task.data["seed"]), **self.reset})
            await socket.send_json({"type": "close"})


@dataclass(frozen=True, slots=True)
class _OpenEnvWorld:
    _agent: OpenEnv
    _socket: aiohttp.ClientWebSocketResponse
    _start: Mapping[str, Any]

    async def reset(self) -> str:
        answer = await self._ask("reset", self._start)
        if answer.code:
            raise RuntimeError(f"the OpenEnv server refuses to reset: {answer.message} ({answer.code})")
        return self._agent.tell(answer.observation)

    async def step(self, said: str) -> WorldStep:
        answer = await self._ask("step", self._agent.read(said))
        if answer.code == "VALIDATION_ERROR":  # the environment rejects the action
            raise NoAction("; ".join(str(error.get("msg")) for error in answer.errors) or answer.message)
        if answer.code:
            raise RuntimeError(f"the OpenEnv server cannot step: {answer.message} ({answer.code})")
        reward = answer.reward if answer.reward is not None else 0.0
        return WorldStep(told=self._agent.tell(answer.observation), reward=reward, is_over=answer.done)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> _Data:
        await self._socket.send_json({"type": kind, "data": data})
        received = await self._socket.receive()
        if received.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"the OpenEnv server at {self._agent.url} closed the episode's connection")
        try:
            return _Response.model_validate_json(received.data).data
        except ValidationError as error:
            raise ValueError(
                f"the OpenEnv server at {self._agent.url} sent an invalid response: {received.data:.200}"
            ) from error
