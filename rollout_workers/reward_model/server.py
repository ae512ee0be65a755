"""The reward model behind HTTP: POST /score {prompt, response} -> {score}.

requests ──▶ queue ──▶ as many as a packed row holds ──▶ one forward pass ──▶ their scores
                             (meanwhile others queue for the next pass)
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from async_rl.http.server import listen, require_token, url_of
from async_rl.tokenization.rendering import (
    AnswerTokenizer,
    PromptFormat,
    RenderedText,
    answered,
    read_answer,
    read_messages,
)

MOST_WAITING = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Asked:
    text: RenderedText
    score: asyncio.Future[float]


@dataclass
class RewardServer:
    score: Callable[[Sequence[RenderedText]], Awaitable[list[float]]]
    tokenizer: AnswerTokenizer
    prompt_format: PromptFormat
    row_tokens: int
    context_tokens: int

    def __post_init__(self) -> None:
        self._longest = min(self.row_tokens, self.context_tokens)
        self._waiting: deque[_Asked] = deque()
        self._arrived = asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        if len(self._waiting) >= MOST_WAITING:
            raise web.HTTPServiceUnavailable(text=f"{MOST_WAITING} texts are waiting already")
        try:
            text = self._text(await request.json())
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        asked = _Asked(text=text, score=asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        self._arrived.set()
        return web.json_response({"score": await asked.score})

    async def serve(self) -> None:
        """
        consumes: requests (answer)    waits for:    one of them
        produces: their scores         unblocked by: a request
        """
        while True:
            await self._arrived.wait()
            batch = self._next_row()
            for asked, score in zip(batch, await self.score([asked.text for asked in batch]), strict=True):
                if not asked.score.done():  # the client may have left
                    asked.score.set_result(score)

    def _next_row(self) -> list[_Asked]:
        batch = [self._waiting.popleft()]
        room = self.row_tokens - len(batch[0].text)
        while self._waiting and len(self._waiting[0].text) <= room:
            batch.append(self._waiting.popleft())
            room -= len(batch[-1].text)
        if not self._waiting:
            self._arrived.clear()
        return batch

    def _text(self, said: Any) -> RenderedText:
        if not isinstance(said, dict) or not {"prompt", "response"} <= said.keys():
            raise ValueError('expected {"prompt": ..., "response": ...}')
        # messages are a whole prompt already, system message included
        prompt = self.prompt_format.prompt(said["prompt"]) if isinstance(said["prompt"], str) else read_messages(said["prompt"])
        text = answered(self.tokenizer, prompt, read_answer(said["response"]))
        if len(text) > self._longest:
            raise ValueError(f"the text has {len(text)} tokens, and at most {self._longest} fit")
        return text


@asynccontextmanager
async def listening(server: RewardServer, *, host: str, port: int, token: str = "") -> AsyncGenerator[str]:
    """Listen while inside; yields the address. Raises ConfigError when the port cannot be used."""
    application = web.Application(middlewares=[require_token("the reward model", token)])
    application.router.add_post("/score", server.answer)
    async with listen(application, host, port) as bound:
        yield url_of(host, bound)
