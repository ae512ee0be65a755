"""Serve an environment over HTTP: episodes are played here with the model of the worker that asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import structlog
from aiohttp import WSMsgType, web

from async_rl.config.exposure import knows, refuse_exposure
from async_rl.config.rollout import EnvironmentConfig, TimeoutsConfig
from async_rl.errors import ConfigError
from async_rl.protocols import EpisodeContext, FiniteAgent, Gateway, GroupAgent, InferenceInterface, Tokenizer
from async_rl.types import Failure, Rollout
from rollout_workers.environment_pool import EnvironmentPool, EnvironmentUnavailable
from rollout_workers.episodes.episode import play, play_group, pose_task
from rollout_workers.episodes.task_mix import TaskSource
from rollout_workers.registry import build_agent
from rollout_workers.remote.socket_model import PendingGenerations, SocketInference
from rollout_workers.remote.tokenizers import tokenizer_for
from rollout_workers.remote.wire import (
    MAX_BYTES,
    SCHEMA,
    MalformedMessage,
    WireMap,
    pack,
    read_returns,
    read_task,
    read_ticket,
    unpack,
    write_rollout,
    write_task,
)

log = structlog.get_logger()

HEARTBEAT_S = 15.0
"""A dead peer is noticed within twice this time."""
WHOLE_EPISODE_S = 7 * 24 * 3600.0
"""Never reached: the worker closes the socket at its own deadline."""
RUNS_MOST = 64
"""Maximum number of (name, seed) pairs for which the environment is made."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def open_server(
    section: EnvironmentConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str = "",
    tokenizer: Tokenizer | None = None,
    gateway: Gateway | None = None,
    max_episodes: int = 1024,
) -> AsyncGenerator[str]:
    """Serve until the block is left; yields the url. Raises ConfigError for a wrong environment or address."""
    refuse_exposure("the environment", host, token=token, insecure=False, way_out="give --token-file")
    server = EnvironmentServer(section, token=token, tokenizer=tokenizer, gateway=gateway, max_episodes=max_episodes)
    runner = web.AppRunner(server.application(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    async with server.pool.open():
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            yield f"http://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}"
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        finally:
            await runner.cleanup()


class EnvironmentServer:
    def __init__(
        self,
        section: EnvironmentConfig,
        *,
        token: str,
        tokenizer: Tokenizer | None,
        gateway: Gateway | None,
        max_episodes: int,
    ) -> None:
        self.pool = EnvironmentPool([])
        self._section = section
        agent = build_agent(section, 0)
        self._plays_groups = isinstance(agent, GroupAgent)
        self._num_tasks = agent.num_tasks if isinstance(agent, FiniteAgent) else None
        self._token, self._tokenizer, self._gateway = token, tokenizer, gateway
        self._runs: set[tuple[str, int]] = set()
        self._free = max_episodes

    def application(self) -> web.Application:
        application = web.Application(middlewares=[self._guard], client_max_size=2**20)
        application.add_routes(
            [web.get("/hello", self._hello), web.get("/task", self._task), web.get("/play", self._play)]
        )  # fmt: skip
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not knows(request.headers.get("Authorization", ""), self._token):
            raise web.HTTPUnauthorized(text="the environment server does not know this token")
        try:
            return await handler(request)
        except (MalformedMessage, ConfigError, EnvironmentUnavailable) as error:
            raise web.HTTPBadRequest(text=str(error)) from error

    async def _hello(self, request: web.Request) -> web.Response:
        about = {"type": self._section.type, "plays_groups": self._plays_groups, "num_tasks": self._num_tasks}
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
        return _answer({"task": write_task(task)})

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
        return {"rollouts": [write_rollout(rollout) for rollout in rollouts]}

    async def _rollouts(self, order: WireMap, pending: PendingGenerations) -> tuple[Rollout, ...]:
        match order:
            case {"schema": int() as schema} if schema != SCHEMA:
                raise MalformedMessage(
                    f"the worker speaks schema {schema} and this server {SCHEMA}: use the same async_rl on both sides"
                )
            case {
                "name": str() as name,
                "seed": int() as seed,
                "task": task,
                "contexts": list() as contexts,
                "models": {"": _} as models,
                "timeouts": dict() as timeouts,
            }:
                pass
            case _:
                raise MalformedMessage("an order names environment, task, contexts and models")
        posed = read_task(task)
        made = {model: self._model(pending, model, said) for model, said in models.items()}
        episodes = [self._context(said, made) for said in contexts]
        limits: Any = {"timeout_s": WHOLE_EPISODE_S, "timeouts": TimeoutsConfig.model_validate(timeouts)}
        async with self._source(name, seed, episodes[0].ticket.task_index) as source:
            if isinstance(source.agent, GroupAgent):
                return await play_group(source.agent, posed, made[""], episodes, **limits)
            return (await play(source.agent, posed, made[""], episodes[0], **limits),)

    def _model(self, pending: PendingGenerations, name: str, said: Mapping[str, Any]) -> InferenceInterface:
        return SocketInference(pending, name, tokenizer_for(said["tokenizer"], self._tokenizer), read_returns(said["mark"]))

    def _context(self, said: Mapping[str, Any], models: Mapping[str, InferenceInterface]) -> EpisodeContext:
        policies = {name: model for name, model in models.items() if name}
        ticket = read_ticket(said["ticket"])
        return EpisodeContext(
            ticket=ticket, sibling=said["sibling"], seed=said["seed"], gateway=self._gateway, policies=policies
        )  # fmt: skip

    @asynccontextmanager
    async def _source(self, name: str, seed: int, index: int) -> AsyncGenerator[TaskSource]:
        """Yield the environment of a run: each name and seed has its own agent."""
        if (name, seed) not in self._runs and len(self._runs) >= RUNS_MOST:
            raise ConfigError(f"this environment server plays under {RUNS_MOST} names and seeds already: start another one")
        self._runs.add((name, seed))
        section = self._section.model_copy(update={"name": name})
        key = f"{name}/{seed}"
        self.pool.add(key, partial(build_agent, section, seed))
        async with self.pool.use(key, is_detached=lambda: False) as agent:
            yield TaskSource(environment=section, agent=agent, index=index)


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
