"""Errors of requests: one sentence each, in the form OpenAI's clients expect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from pydantic import ValidationError
from pydantic_core import ErrorDetails


class RequestError(Exception):
    """A request is refused; `response` is what the client gets."""

    def __init__(
        self,
        status: int,
        sentence: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        """`param` is the field of the request that is wrong: messages[0].role."""
        super().__init__(sentence)
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param

    def response(self) -> web.Response:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return web.json_response({"error": error}, status=self.status)


def closed() -> RequestError:
    return RequestError(410, "this episode is over: nothing more is sampled for it", kind="episode_over")


def not_offered(param: str, how: str = "leave it out") -> RequestError:
    return RequestError(400, f"{param} is not offered here: {how}", param=param, code="unsupported_parameter")


def malformed(error: ValidationError, body: bytes) -> RequestError:
    """The error for a body that does not validate, naming the field."""
    errors = error.errors(include_url=False)
    if errors[0]["type"] == "json_invalid":
        return RequestError(400, "the body of the request is not valid JSON")
    # For a field of several possible types, report the error that lies deepest.
    content, field = json.loads(body), errors[0]["loc"][:1]
    placed = [(_path(each["loc"], content), each) for each in errors if each["loc"][:1] == field]
    param, first = max(placed, key=lambda each: each[0].count(".") + each[0].count("["))
    return RequestError(400, f"{param if param else 'the body'} {_sentence(first)}", param=param if param else None)


def from_http(error: web.HTTPException, max_body_mb: float) -> RequestError:
    if error.status == 413:
        return RequestError(413, f"the request is larger than worker.gateway.max_body_mb={max_body_mb:g} allows")
    return RequestError(error.status, f"{error.reason}: see docs/gateway.md for what is served", code="unknown_url")


def _path(location: Sequence[int | str], body: Any) -> str:
    """The location in the body as OpenAI writes it: messages[0].content. Pydantic's names of union members are left out:
    they are not keys of the body. A last part may be missing there.
    """
    path, value = "", body
    for place, part in enumerate(location):
        if isinstance(part, int):
            if isinstance(value, list) and part < len(value):  # pyright: ignore[reportUnknownArgumentType]
                path, value = f"{path}[{part}]", value[part]  # pyright: ignore[reportUnknownVariableType]
        elif isinstance(value, dict) and (part in value or place == len(location) - 1):
            path, value = f"{path}.{part}" if path else part, value.get(part)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return path


WANTED = {
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "tuple": "a list",
    "list": "a list",
    "dict": "an object",
    "model": "an object",
    "finite_number": "a finite number",
}


def _sentence(first: ErrorDetails) -> str:
    kind, context = first["type"], first.get("ctx", {})
    given = f"{first['input']!r:.60}"
    if kind.endswith("too_short"):
        return "must not be empty"
    if (wanted := WANTED.get(kind.partition("_")[0], WANTED.get(kind))) is not None:
        return f"must be {wanted}, not {given}"
    match kind:
        case "missing":
            return "is missing"
        case "value_error":
            return f"cannot be used: {context['error']}"
        case "literal_error":
            return f"must be {context['expected']}, not {given}"
        case "union_tag_invalid":
            return f"must have a type out of {context['expected_tags']}, not {context['tag']!r}"
        case "union_tag_not_found":
            return "must say its type"
        case "greater_than_equal":
            return f"must be at least {context['ge']}, not {given}"
        case "less_than":
            return f"must be below {context['lt']}, not {given}"
        case _:
            return f"is wrong: {given}"
