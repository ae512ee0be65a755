"""Serves the page: files of static/ as they are, and JSON that is made from a run's folder at each request.

GET /                 index.html; `?token=` sets the cookie
GET /static/...       ES modules, one style sheet, vendor/
GET /api/run          the state, and columns of `names` since the row `since`
GET /api/config       every setting with its origin, without secrets
GET /api/compare      curves, settings and evaluations of this run and of `runs` beside it
GET /api/lanes        what every process did in the last `seconds` (0: all), or from `since` to `until` in milliseconds;
                      `worker`: the episodes of this one
GET /api/rollouts ... the recorded rollouts (recorded/routes.py)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from async_rl.http.server import Handler, listen, url_of
from async_rl.payloads.as_json import dump_json
from async_rl.view.compare import compare
from async_rl.view.guard import add_headers, guard
from async_rl.view.opened_run import open_folder, runs_beside
from async_rl.view.recorded.routes import RolloutRoutes
from async_rl.view.run_view import RunView

STATIC = Path(__file__).with_name("static")
POINTS, MOST_POINTS = 600, 4000
"""Points of a curve unless the client asks for another number, and the most that it gets."""

LANES_S = 30


class ViewServer:
    """Answers requests about a run."""

    def __init__(self, view: RunView) -> None:
        self._view = view
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="view")
        """Reads files, one request after the other, also where a client leaves before its answer."""
        self._others: dict[Path, RunView] = {}
        """Runs that were compared so far."""
        self._rollouts = RolloutRoutes(view.rollouts, self._thread)

    @property
    def routes(self) -> dict[str, Handler]:
        own = {
            "/": self.page,
            "/api/run": self.run,
            "/api/config": self.config,
            "/api/compare": self.compare,
            "/api/lanes": self.lanes,
        }
        return own | self._rollouts.routes

    async def page(self, _request: web.Request) -> web.StreamResponse:
        return web.FileResponse(STATIC / "index.html")

    async def run(self, request: web.Request) -> web.Response:
        names, query = _list(request, "names"), request.query
        live = await self._view.live_state()
        return as_json(await asyncio.get_running_loop().run_in_executor(self._thread, self._read, live, names, query))

    def _read(self, live: Any, names: list[str], query: Mapping[str, str]) -> dict[str, Any]:
        self._view.refresh()
        series = self._view.series(
            names, points=_points(query), since=_number(query, "since", 0), server=query.get("server", "")
        )
        return {**self._view.state(live), "series": series}

    async def config(self, _request: web.Request) -> web.Response:
        folder = self._view.folder
        changed = folder.changed
        rows = [(key, value, folder.origins.get(key, ""), key in changed) for key, value in folder.settings.items()]
        return as_json({"run": folder.name, "problem": folder.problem, "settings": rows})

    async def compare(self, request: web.Request) -> web.Response:
        return as_json(await asyncio.get_running_loop().run_in_executor(self._thread, self._compare, request))

    async def lanes(self, request: web.Request) -> web.Response:
        query = request.query
        since, until = (_number(query, name, 0) / 1000 for name in ("since", "until"))
        window = {"seconds": _number(query, "seconds", LANES_S), "since": since, "until": until}
        read = partial(self._view.lanes, **window, worker=query.get("worker", ""))
        return as_json(await asyncio.get_running_loop().run_in_executor(self._thread, read))

    def _compare(self, request: web.Request) -> dict[str, Any]:
        own = self._view.folder
        known = {**runs_beside(own.path), own.name: own.path}
        chosen = [own.name, *(name for name in _list(request, "runs") if name in known and name != own.name)]
        views = [self._opened(known[name]) for name in chosen]
        found = compare(views, _list(request, "names"), points=_points(request.query))
        return {"runs": sorted(known), **found}

    def _opened(self, path: Path) -> RunView:
        view = self._view if path == self._view.folder.path else self._others.get(path)
        if view is None:
            view = self._others[path] = RunView(open_folder(path))
        view.refresh()
        return view


@asynccontextmanager
async def serving(routes: Mapping[str, Handler], *, host: str, port: int, token: str) -> AsyncGenerator[str]:
    """Serve until the block is left; yields the address with its token. Raises ConfigError if it cannot listen."""
    application = web.Application(middlewares=[guard(token, host)])
    application.on_response_prepare.append(add_headers)
    for path, handler in routes.items():
        application.router.add_get(path, handler)
    application.router.add_static("/static", STATIC)
    async with listen(application, host, port, key="--port") as at:
        yield f"{url_of(host, at)}/?token={token}"


def as_json(document: Any) -> web.Response:
    response = web.json_response(document, dumps=dump_json)
    response.enable_compression()
    return response


def _list(request: web.Request, name: str) -> list[str]:
    return [word for word in request.query.get(name, "").split(",") if word]


def _points(query: Mapping[str, str]) -> int:
    return min(_number(query, "points", POINTS), MOST_POINTS)


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    given = query.get(name, "")
    if given and not given.isdecimal():
        raise web.HTTPBadRequest(text=f"{name}={given!r} is not a number\n")
    return int(given) if given else default
