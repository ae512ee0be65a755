"""Serve an environment over HTTP: episodes are played here with the model of the worker that asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
from aiohttp import WSMsgType, web

from async_rl.config.exposure import refuse_exposure
from async_rl.config.rollout import EnvironmentConfig
from async_rl.errors import ConfigError
from async_rl.http.server import Handler, listen, require_token, url_of
from async_rl.protocols import EpisodeContext, FiniteAgent, Gateway, GroupAgent, Tokenizer
from async_rl.types import Failure, Rollout
from rollout_workers.environment_pool import EnvironmentPool, EnvironmentUnavailable
from rollout_workers.episodes.episode import play, play_group, pose_task
from rollout_workers.episodes.task_mix import TaskSource
from rollout_workers.registry import build_agent
from rollout_workers.remote.socket_model import PendingGenerations, SocketInference
from rollout_workers.remote.tokenizers import tokenizer_for
from rollout_workers.remote.wire import (
    HEARTBEAT_S,
    MAX_BYTES,
    ORDER,
    SCHEMA,
    MalformedMessage,
    WireMap,
    pack,
    read,
    unpack,
)

log = structlog.get_logger()

WHOLE_EPISODE_S = 7 * 24 * 3600.0
"""Never reached: the worker closes the socket at its own deadline."""
RUNS_MOST = 64
"""Maximum number of (name, seed) pairs for which the environment is made."""


@dataclass(kw_only=True)
class EnvironmentServer:
    section: EnvironmentConfig
    token: str = ""
    """Workers must send it; required to listen beyond this machine."""
    tokenizer: Tokenizer | None = None
    gateway: Gateway | None = None
    max_episodes: int = 1024
    """Maximum concurrent episodes."""

    def __post_init__(self) -> None:
        self._pool = EnvironmentPool([])
        agent = build_agent(self.section, 0)
        self._plays_groups = isinstance(agent, GroupAgent)
        self._num_tasks = agent.num_tasks if isinstance(agent, FiniteAgent) else None
        self._runs: set[tuple[str, int]] = set()
        self._free = self.max_episodes

    @asynccontextmanager
    async def listening(self, *, host: str = "127.0.0.1", port: int = 0) -> AsyncGenerator[str]:
        """Serve until the block is left; yields the url. Raises ConfigError for an address that cannot be used."""
        refuse_exposure("the environment", host, token=self.token, insecure=False, way_out="give --token-file")
        async with self._pool.open(), listen(self._application(), host, port) as bound:
            yield url_of(host, bound)

    def _application(self) -> web.Application:
        guard = require_token("the environment server", self.token)
        application = web.Application(middlewares=[guard, _refuse], client_max_size=2**20)
        application.add_routes([web.get("/hello", self._hello), web.get("/task", self._task), web.get("/play", self._play)])
        return application

    async def _hello(self, request: web.Request) -> web.Response:
        about = {"type": self.section.type, "plays_groups": self._plays_groups, "num_tasks": self._num_tasks}
        return _answer({"schema": SCHEMA, **about})

    async def _task(self, request: web.Request) -> web.Response:
        try:
            name, seed, index = request.query["name"], int(request.query["seed"]), int(request.query["index"])
        except (KeyError, ValueError) as error:
            raise MalformedMessage("a task has a name, a seed and an index") from error
        async with self._source(name, seed, index) as source:
            task = await pose_task(source)
        if isinstance(task, Failure):
            return _answer({"failure": f"{task.kind}: {task.message}"})
        return _answer({"task": task})

    async def _play(self, request: web.Request) -> web.StreamResponse:
        if not self._free:
            raise web.HTTPServiceUnavailable(text="the environment server plays as many episodes as it may")
        socket = web.WebSocketResponse(max_msg_size=MAX_BYTES, heartbeat=HEARTBEAT_S)
        self._free -= 1
        try:
            await socket.prepare(request)
            order = unpack(await socket.receive_bytes())
            await self._converse(socket, order)
        except (MalformedMessage, TypeError) as error:  # TypeError: the first message was not binary
            await socket.close(message=str(error)[:100].encode())
        finally:
            self._free += 1
        return socket

    async def _converse(self, socket: web.WebSocketResponse, order: WireMap) -> None:
        """Play one order. The episode is cancelled when the worker disconnects."""

        async def send(message: WireMap) -> None:
            if not socket.closed:
                await socket.send_bytes(pack(message))

        pending = PendingGenerations(send)
        async with asyncio.TaskGroup() as tasks:
            playing = tasks.create_task(self._played(order, pending))
            listening = tasks.create_task(_listen(socket, pending, playing))
            await asyncio.wait([playing])
            if not playing.cancelled():
                await send(playing.result())
            listening.cancel()

    async def _played(self, order: WireMap, pending: PendingGenerations) -> WireMap:
        try:
            rollouts = await self._rollouts(order, pending)
        except (MalformedMessage, ConfigError, EnvironmentUnavailable) as error:
            return {"refused": str(error)}
        return {"rollouts": rollouts}

    async def _rollouts(self, message: WireMap, pending: PendingGenerations) -> tuple[Rollout, ...]:
        if (schema := message.get("schema")) != SCHEMA:
            raise MalformedMessage(
                f"the worker speaks schema {schema} and this server {SCHEMA}: use the same async_rl on both sides"
            )
        order = read(ORDER, message)
        if "" not in order.models:
            raise MalformedMessage("an order without the trained model")
        models = {
            name: SocketInference(pending, name, tokenizer_for(each.tokenizer, self.tokenizer), each.mark)
            for name, each in order.models.items()
        }
        trained, policies = models[""], {name: model for name, model in models.items() if name}
        episodes = [
            EpisodeContext(ticket=each.ticket, sibling=each.sibling, seed=each.seed, gateway=self.gateway, policies=policies)
            for each in order.contexts
        ]
        limits: Any = {"timeout_s": WHOLE_EPISODE_S, "timeouts": order.timeouts}
        async with self._source(order.name, order.seed, episodes[0].ticket.task_index) as source:
            if isinstance(source.agent, GroupAgent):
                return await play_group(source.agent, order.task, trained, episodes, **limits)
            return (await play(source.agent.rollout, order.task, trained, episodes[0], **limits),)

    @asynccontextmanager
    async def _source(self, name: str, seed: int, index: int) -> AsyncGenerator[TaskSource]:
        """Yield the environment of a run: each name and seed has its own agent."""
        if (name, seed) not in self._runs and len(self._runs) >= RUNS_MOST:
            raise ConfigError(f"this environment server plays under {RUNS_MOST} names and seeds already: start another one")
        self._runs.add((name, seed))
        section = self.section.model_copy(update={"name": name})
        key = f"{name}/{seed}"
        self._pool.add(key, partial(build_agent, section, seed))
        async with self._pool.use(key, is_detached=lambda: False) as agent:
            yield TaskSource(environment=section, agent=agent, index=index)


@web.middleware
async def _refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except (MalformedMessage, ConfigError, EnvironmentUnavailable) as error:
        raise web.HTTPBadRequest(text=str(error)) from error


async def _listen(socket: web.WebSocketResponse, pending: PendingGenerations, playing: asyncio.Task[Any]) -> None:
    try:
        async for message in socket:
            if message.type is not WSMsgType.BINARY:
                break
            match unpack(message.data):
                case {"number": int() as number, "completion": completion}:
                    pending.answer(number, completion)
                case {"number": int() as number, "kind": str() as kind, "message": str() as reason}:
                    pending.refuse(number, kind, reason)
                case _:
                    break
    except MalformedMessage as error:
        log.warning("a worker sent an invalid message", reason=str(error))
    playing.cancel()


def _answer(message: WireMap) -> web.Response:
    return web.Response(body=pack(message), content_type="application/msgpack")
