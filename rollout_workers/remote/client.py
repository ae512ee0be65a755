"""The worker's side of an environment server: an agent whose episodes are played on the server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from aiohttp import (
    ClientError,
    ClientSession,
    ClientTimeout,
    ClientWebSocketResponse,
    TCPConnector,
    WSMsgType,
    WSServerHandshakeError,
)

from async_rl.config.exposure import read_token
from async_rl.errors import ConfigError
from async_rl.protocols import EpisodeContext, InferenceInterface
from async_rl.types import Rollout, Task
from rollout_workers.episodes.stage_timeouts import current_timeouts
from rollout_workers.inference.interface import returns_of
from rollout_workers.remote.tokenizers import describe
from rollout_workers.remote.wire import (
    ARGS,
    HEARTBEAT_S,
    MAX_BYTES,
    ROLLOUT,
    SCHEMA,
    TASK,
    EpisodeOrder,
    OrderedEpisode,
    OrderedModel,
    WireMap,
    pack,
    read,
    read_prompt,
    unpack,
)

ANSWER_S = 60.0
"""Time limit of requests other than episodes."""


class EnvironmentServerFailed(Exception):
    """The environment server refused, or cannot be reached."""


class RemoteAgent:
    """Plays the environment served at `url`. Name and seed are the run's; the other arguments are the server's."""

    def __init__(self, *, name: str, url: str, seed: int = 0, token_file: str = "") -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, got {url!r}")
        self._name, self._seed, self._url = name, seed, url.rstrip("/")
        self._token = read_token(token_file, key=f"environment {name!r}: token_file")

    async def __aenter__(self) -> Self:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        # One socket per episode; the worker limits their number.
        self._session = ClientSession(headers=headers, connector=TCPConnector(limit=0))
        try:
            await self._greet()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def _greet(self) -> None:
        try:
            hello = await self._get("/hello")
        except (EnvironmentServerFailed, TimeoutError) as error:
            raise ConfigError(f"environment {self._name!r}: {error}; `async-rl env serve` starts a server") from error
        if hello.get("schema") != SCHEMA:
            raise ConfigError(
                f"the environment server at {self._url} speaks schema {hello.get('schema')} and this worker {SCHEMA}: "
                "use the same async_rl on both sides"
            )
        num_tasks = hello.get("num_tasks")
        self.num_tasks = num_tasks if isinstance(num_tasks, int) else None
        if hello.get("plays_groups"):
            self.rollout_group = self._play  # with this method it is a GroupAgent

    async def __aexit__(self, *problem: object) -> None:
        await self._session.close()

    async def task(self, index: int) -> Task:
        answer = await self._get("/task", name=self._name, seed=str(self._seed), index=str(index))
        if "failure" in answer:
            raise EnvironmentServerFailed(answer["failure"])
        return read(TASK, answer.get("task"))

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        [rollout] = await self._play(task, inference, [context])
        return rollout

    async def _play(self, task: Task, inference: InferenceInterface, contexts: Sequence[EpisodeContext]) -> list[Rollout]:
        models = {"": inference, **contexts[0].policies}
        order = EpisodeOrder(
            name=self._name,
            seed=self._seed,
            task=task,
            contexts=tuple(OrderedEpisode(ticket=each.ticket, sibling=each.sibling, seed=each.seed) for each in contexts),
            models={
                name: OrderedModel(mark=returns_of(model), tokenizer=describe(model.tokenizer))
                for name, model in models.items()
            },
            timeouts=current_timeouts(),
        )
        try:
            async with self._session.ws_connect(f"{self._url}/play", max_msg_size=MAX_BYTES, heartbeat=HEARTBEAT_S) as socket:
                await socket.send_bytes(pack(order))
                last = await _serve_generations(socket, models)
        except WSServerHandshakeError as error:
            raise EnvironmentServerFailed(f"the environment server at {self._url} refuses to play ({error.status})") from error
        except (ClientError, OSError) as error:
            raise self._gone(error) from error
        match last:
            case {"rollouts": list() as rollouts}:
                return [read(ROLLOUT, rollout) for rollout in rollouts]
            case {"refused": str() as reason}:
                raise EnvironmentServerFailed(reason)
            case _:
                raise self._gone("the connection ended in the middle of an episode")

    async def _get(self, path: str, **query: str) -> dict[str, Any]:
        try:
            async with self._session.get(f"{self._url}{path}", params=query, timeout=ClientTimeout(total=ANSWER_S)) as response:
                if response.status != 200:
                    reason = (await response.text())[:500]
                    raise EnvironmentServerFailed(f"the environment server at {self._url} says: {reason}")
                return unpack(await response.read())
        except (ClientError, OSError) as error:
            raise self._gone(error) from error

    def _gone(self, error: object) -> EnvironmentServerFailed:
        return EnvironmentServerFailed(f"the environment server at {self._url} cannot be reached: {error}")


async def _serve_generations(socket: ClientWebSocketResponse, models: Mapping[str, InferenceInterface]) -> WireMap:
    """Serve the episode's generations until it ends. Returns its last message; empty if the connection broke first."""
    generating: dict[int, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as tasks:
        try:
            async for message in socket:
                if message.type is not WSMsgType.BINARY:
                    break
                match unpack(message.data):
                    case {"generate": {"number": int() as number, "model": str() as name} as question} if name in models:
                        answer = _generate(socket, number, models[name], question)
                        generating[number] = tasks.create_task(answer, name=f"remote generation {number}")
                        generating[number].add_done_callback(lambda _, number=number: generating.pop(number, None))
                    case {"cancel": int() as number}:
                        if number in generating:
                            generating[number].cancel()
                    case last:
                        return last
        finally:
            for task in generating.values():  # the episode has ended
                task.cancel()
    return {}


async def _generate(socket: ClientWebSocketResponse, number: int, model: InferenceInterface, question: WireMap) -> None:
    try:
        completion = await model.generate(read_prompt(question.get("prompt")), read(ARGS, question.get("args")))
        reply: WireMap = {"number": number, "completion": completion}
    except Exception as error:  # raised again in the agent on the server
        reply = {"number": number, "kind": type(error).__name__, "message": f"{type(error).__name__}: {error}"}
    with suppress(ClientError, OSError):  # the reader of the socket notices that it closed
        await socket.send_bytes(pack(reply))
