"""The gateway: one HTTP server in a worker's process, with an OpenAI-compatible endpoint for every episode.

    /s/EPISODE/v1/chat/completions      or     /v1/chat/completions  with  Authorization: Bearer EPISODE

Access to an endpoint needs the key of its episode: 128 random bits, known to its agent and valid until the episode ends.
"""

from __future__ import annotations

import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import structlog
from aiohttp import web

from async_rl.config.exposure import knows
from async_rl.config.rollout import GatewayConfig
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.http.server import Handler, listen, url_of
from async_rl.protocols import ContextOverflow, GenerationArgs, InferenceInterface
from rollout_workers.gateway.counters import GatewayCounters
from rollout_workers.gateway.endpoints.chat import chat_completions
from rollout_workers.gateway.endpoints.completions import completions
from rollout_workers.gateway.endpoints.responses import responses
from rollout_workers.gateway.endpoints.tokens import detokenize, generate, tokenize
from rollout_workers.gateway.request_errors import RequestError, closed, from_http
from rollout_workers.gateway.session import EpisodeSession

log = structlog.get_logger()

Endpoint = Callable[[web.Request, EpisodeSession], Awaitable[web.StreamResponse]]

REMEMBERED = 10_000
"""Number of ended episodes that are still answered with 410 instead of 404, so that late agents see why they fail."""


@asynccontextmanager
async def open_gateway(config: GatewayConfig, *, context_tokens: int, run_token: str) -> AsyncIterator[HttpGateway]:
    """Serve until the block is left. `context_tokens` is the model's context; `run_token` gives access to /metrics."""
    gateway = HttpGateway(config, context_tokens, run_token)
    advertised = config.advertised_host
    if advertised is None:
        advertised = socket.gethostname() if config.host in ("0.0.0.0", "::") else config.host
    async with listen(gateway.application(), config.host, config.port, key="worker.gateway") as port:
        gateway.address = url_of(advertised, port)
        try:
            yield gateway
        finally:
            await gateway.close()


class HttpGateway:
    """Implements `Gateway`."""

    address: str
    """The url under which agents reach it."""

    def __init__(self, config: GatewayConfig, context_tokens: int, run_token: str) -> None:
        self.counters = GatewayCounters()
        self.worker_counters: Callable[[], Mapping[str, float]] = dict
        """Further counters of the process that /metrics shows; a worker sets it."""
        self._config = config
        self._context_tokens = context_tokens
        self._run_token = run_token
        self._open: dict[str, EpisodeSession] = {}
        self._over: OrderedDict[str, None] = OrderedDict()

    @asynccontextmanager
    async def session(
        self, inference: InferenceInterface, args: GenerationArgs | None = None, *, name: str = "policy"
    ) -> AsyncIterator[EpisodeSession]:
        key = secrets.token_urlsafe(16)
        session = EpisodeSession(
            api_key=key,
            base_url=f"{self.address}/s/{key}/v1",
            name=name,
            inference=inference,
            args=args if args is not None else GenerationArgs(),
            settings=self._config,
            context_tokens=self._context_tokens,
            counters=self.counters,
        )
        self._open[key] = session
        self.counters.sessions += 1
        try:
            yield session
        finally:
            del self._open[key]
            self._over[key] = None
            if len(self._over) > REMEMBERED:
                self._over.popitem(last=False)
            self.counters.sessions -= 1
            self.counters.forks += session.forks
            await session.close()

    async def close(self) -> None:
        for session in list(self._open.values()):
            await session.close()

    def application(self) -> web.Application:
        application = web.Application(client_max_size=int(self._config.max_body_mb * 2**20), middlewares=[self._answer])
        for method, path, endpoint in _ENDPOINTS:
            handler = self._for_episode(endpoint)
            application.router.add_route(method, f"/s/{{episode}}{path}", handler)
            application.router.add_route(method, path, handler)
        application.router.add_get("/health", self._health)
        application.router.add_get("/metrics", self._metrics)
        return application

    def _for_episode(self, endpoint: Endpoint) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await endpoint(request, self._session_of(request))

        return handle

    def _session_of(self, request: web.Request) -> EpisodeSession:
        key = request.match_info.get("episode", _bearer(request))
        if (session := self._open.get(key)) is not None:
            return session
        if key in self._over:
            raise closed()
        if "episode" in request.match_info:
            raise RequestError(
                404, "there is no such episode: use the base_url that the episode's session gave", code="no_episode"
            )
        raise RequestError(401, "give the episode's key as api_key (Authorization: Bearer KEY)", code="invalid_api_key")

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware: return every error in OpenAI's form."""
        self.counters.requests += 1
        try:
            return await handler(request)
        except Exception as error:
            self.counters.refused += 1
            return self._error_for(error).response()

    def _error_for(self, error: Exception) -> RequestError:
        match error:
            case RequestError():
                return error
            case web.HTTPException():
                return from_http(error, self._config.max_body_mb)
            case ContextOverflow():
                return RequestError(400, str(error), code="context_length_exceeded")
            case ValueError() | ConfigError():  # raised by the engine or the chat template
                return RequestError(400, str(error), param=_named_by(error))
            case AsyncRLError():
                return RequestError(503, str(error), kind="unavailable")
            case _:
                log.error("a request to the gateway broke", error=repr(error), exc_info=error)
                return RequestError(500, f"{type(error).__name__}: {error}", kind="server_error")

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self._run_token or not knows(request.headers.get("Authorization", ""), self._run_token):
            raise RequestError(401, "give the run's token (Authorization: Bearer TOKEN)", code="invalid_api_key")
        return web.Response(body=self.counters.exposition(self.worker_counters()), content_type="text/plain")


def _named_by(error: Exception) -> str | None:
    """The argument an engine's error names first, as in `top_p=2 must be ...`."""
    named, found, _ = str(error).partition("=")
    return named if found and named in GenerationArgs.__dataclass_fields__ else None


def _bearer(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ").strip()


async def _models(request: web.Request, session: EpisodeSession) -> web.StreamResponse:
    return web.json_response({"object": "list", "data": [_model_card(session)]})


async def _model(request: web.Request, session: EpisodeSession) -> web.StreamResponse:
    return web.json_response({**_model_card(session), "id": request.match_info["model"]})


def _model_card(session: EpisodeSession) -> dict[str, object]:
    context = session.context_tokens
    return {"id": session.name, "object": "model", "created": 0, "owned_by": "async_rl", "max_model_len": context}


_ENDPOINTS: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/responses", responses),
    ("GET", "/v1/models", _models),
    ("GET", "/v1/models/{model:.+}", _model),
    ("POST", "/inference/v1/generate", generate),
    ("POST", "/v1/tokenize", tokenize),
    ("POST", "/v1/detokenize", detokenize),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
)
