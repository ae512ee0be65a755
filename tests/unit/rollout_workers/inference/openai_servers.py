"""Small servers that speak OpenAI's protocol as several products do, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

JsonObject = dict[str, Any]
Reply = JsonObject | web.Response
Handler = Callable[[JsonObject], Reply | Awaitable[Reply]]


@asynccontextmanager
async def serving(**endpoints: Handler) -> AsyncIterator[tuple[str, list[JsonObject]]]:
    """Its url, and every body that it was sent. `chat` and `completions` are handlers of those endpoints."""
    asked: list[JsonObject] = []

    def answering(handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(request: web.Request) -> web.Response:
            body = await request.json()
            key = request.headers.get("Authorization")
            asked.append(body if key is None else {**body, "key": key})
            reply = handler(body)
            if isinstance(reply, Awaitable):
                reply = await reply
            return reply if isinstance(reply, web.Response) else web.json_response(reply)

        return answer

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "served", "max_model_len": 64}]})

    application = web.Application()
    application.router.add_get("/v1/models", models)
    paths = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
    for name, handler in endpoints.items():
        application.router.add_post(paths[name], answering(handler))
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", asked
    finally:
        await runner.cleanup()


def error(status: int, message: str, code: str = "", **headers: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": code}}, status=status, headers=headers)


def text_choice(text: str, **fields: Any) -> JsonObject:
    return {"choices": [{"index": 0, "text": text, "finish_reason": "stop", "logprobs": None, **fields}]}


def chat_choice(content: str | None, **fields: Any) -> JsonObject:
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": content, **fields}, "finish_reason": "stop"}]}


def token_server(end_id: int, token: int = 7) -> Handler:
    """As vLLM: ids in, ids and log-probabilities out, when asked. Says `token` until its limit, at most three times."""

    def complete(body: JsonObject) -> JsonObject:
        assert body["return_token_ids"]
        assert all(isinstance(each, int) for each in body["prompt"])
        limit = body.get("max_tokens", 16)
        token_ids = [token] * min(limit, 3) + ([end_id] if limit > 3 else [])
        return text_choice(
            "3" * min(limit, 3),
            token_ids=token_ids,
            finish_reason="stop" if limit > 3 else "length",
            logprobs={"tokens": [""] * len(token_ids), "token_logprobs": [-0.25] * len(token_ids)},
        )

    return complete


async def never(_: JsonObject) -> Reply:
    await asyncio.Event().wait()
    raise AssertionError
