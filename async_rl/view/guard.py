"""Who may read the page: holders of the token, from a browser whose address bar names this machine.

A page of another site cannot read ours (same-origin policy) unless its name is made to point here (DNS rebinding): then the
browser sends that name as the Host, which is refused. Scripts run from our files alone (Content-Security-Policy).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from async_rl.http.server import Handler

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def new_token() -> str:
    return secrets.token_urlsafe(24)


def guard(token: str, host: str) -> Middleware:
    """Middleware: refuse foreign Host headers, other methods than GET, and requests without the token.

    The token is in the cookie that `/?token=...` sets, or in an Authorization header.
    """
    # Cookies are shared by all ports of a host, so that two servers need two names.
    cookie = f"async_rl_view_{hashlib.sha256(token.encode()).hexdigest()[:8]}"

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not is_own_host(request.headers.get("Host", ""), host):
            raise web.HTTPMisdirectedRequest(text="this server answers to its address and to localhost, not to this Host\n")
        if request.method not in ("GET", "HEAD"):
            raise web.HTTPMethodNotAllowed(request.method, ("GET", "HEAD"), text="these pages only read\n")
        in_url = request.query.get("token", "") if request.path == "/" else ""
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not any(_equal(given, token) for given in (in_url, bearer, request.cookies.get(cookie, ""))):
            raise web.HTTPUnauthorized(text="open the address that `async-rl view` has printed: it contains the token\n")
        response = await handler(request)
        if in_url:
            response.set_cookie(cookie, token, httponly=True, samesite="Strict", path="/")
        return response

    return check


def is_own_host(header: str, host: str) -> bool:
    """Whether a Host header is an address, localhost or the name that the server listens at: no name that a stranger owns."""
    try:
        name = urlsplit(f"//{header}").hostname
    except ValueError:
        return False
    if name in ("localhost", host.lower()):
        return True
    try:
        ipaddress.ip_address(name if name is not None else "")
    except ValueError:
        return False
    return True


async def add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: every response carries HEADERS, errors too."""
    response.headers.update(HEADERS)


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())
