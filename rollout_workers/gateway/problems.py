"""What is wrong with a request: one sentence, in the form in which OpenAI's clients expect it."""

from __future__ import annotations

from aiohttp import web
from pydantic import ValidationError


class Problem(Exception):
    """Becomes the answer to a request."""

    def __init__(self, status: int, sentence: str, *, kind: str = "invalid_request_error", code: str | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.kind = kind
        self.code = code

    def response(self) -> web.Response:
        error = {"message": str(self), "type": self.kind, "param": None, "code": self.code}
        return web.json_response({"error": error}, status=self.status)


def closed() -> Problem:
    return Problem(410, "this episode is over: nothing more is sampled for it", kind="episode_over")


def malformed(error: ValidationError) -> Problem:
    """The first mistake of a body, by the name of its field."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    return Problem(400, f"{field}: {first['msg']}" if field else str(first["msg"]))


def of_http(error: web.HTTPException, max_body_mb: float) -> Problem:
    if error.status == 413:
        return Problem(413, f"the request is larger than worker.gateway.max_body_mb={max_body_mb:g} allows")
    return Problem(error.status, f"{error.reason}: see docs/gateway.md for what is served", code="unknown_url")
