"""The requests of the page "Rollouts". Rollouts, groups and pieces of them are named by their id in the query.

GET /api/rollouts     a list: the fields of RolloutFilter, `order`, `offset`, `limit`
GET /api/rollout      `id`
GET /api/messages     further messages of a rollout: `id`, `start`
GET /api/text         a piece of a message: `id`, `message`, `start`
GET /api/tokens       a piece of a sample: `id`, `sample`, `start`
GET /api/group        `id`
GET /api/stages       mean seconds of the latest trained episodes by stage
GET /api/fates        the ledger of fates
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any

from aiohttp import web

from async_rl.errors import ConfigError
from async_rl.http.server import Handler
from async_rl.payloads.as_json import dump_json
from async_rl.view.recorded.rollouts import RolloutBrowser

Query = Mapping[str, str]


class RolloutRoutes:
    """Answers from a recording."""

    def __init__(self, browser: RolloutBrowser, thread: Executor) -> None:
        """`thread`: reads the recording, one request after the other."""
        self._browser, self._thread = browser, thread

    @property
    def routes(self) -> dict[str, Handler]:
        browser = self._browser
        return {
            "/api/rollouts": self._answer(browser.page),
            "/api/rollout": self._answer(lambda query: browser.rollout(_id(query))),
            "/api/messages": self._answer(lambda query: browser.messages(_id(query), _number(query, "start"))),
            "/api/text": self._answer(
                lambda query: browser.text(_id(query), _number(query, "message"), _number(query, "start"))
            ),
            "/api/tokens": self._answer(
                lambda query: browser.tokens(_id(query), _number(query, "sample"), _number(query, "start"))
            ),
            "/api/group": self._answer(lambda query: browser.group(_id(query))),
            "/api/stages": self._answer(lambda _query: browser.stages()),
            "/api/fates": self._answer(lambda _query: {"ledger": browser.fates()}),
        }

    def _answer(self, read: Callable[[Query], dict[str, Any] | None]) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            try:
                document = await asyncio.get_running_loop().run_in_executor(self._thread, read, request.query)
            except ConfigError as error:
                raise web.HTTPBadRequest(text=f"{error}\n") from error
            if document is None:
                name = _id(request.query)[:40]
                raise web.HTTPNotFound(
                    text=f"{name!r} is not recorded: it never was, or it was let go because of the size limit\n"
                )
            response = web.json_response(document, dumps=dump_json)
            response.enable_compression()
            return response

        return answer


def _id(query: Query) -> str:
    return query.get("id", "")


def _number(query: Query, name: str) -> int:
    given = query.get(name, "0")
    if not given.isdecimal() or len(given) > 12:
        raise ConfigError(f"{name} is {given[:40]!r}, and must be a number")
    return int(given)
