"""Parse and write tool calls in the text of an answer. Parsing never raises: what is not a call stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, cast

from async_rl.types import ToolCall

ToolCallFormat = Literal["hermes", "llama3_json"]
"""`hermes`: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, what Qwen writes, with text around it.
`llama3_json`: the answer begins with {"name": ..., "parameters": {...}}; several are separated by semicolons.
"""


def parse(text: str, format: ToolCallFormat = "hermes") -> tuple[str, tuple[ToolCall, ...]]:
    """Split an answer into its text and its calls. The calls have no ids; the caller assigns them."""
    return _PARSERS[format](text)


def write(calls: Sequence[ToolCall], format: ToolCallFormat = "hermes") -> str:
    """Write the calls as a model of this format does."""
    if format == "hermes":
        return "\n".join(f"<tool_call>\n{_written(call, 'arguments')}\n</tool_call>" for call in calls)
    return "; ".join(_written(call, "parameters") for call in calls)


def _parse_hermes(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    calls: list[ToolCall] = []
    texts: list[str] = []
    reached = 0
    for found in _TAGGED.finditer(text):
        if (call := _call_of(_decoded(found[1].strip()))) is not None:
            calls.append(call)
            texts.append(text[reached : found.start()])
            reached = found.end()
    texts.append(text[reached:])
    text_beside_calls = "".join(texts)
    return (text_beside_calls.strip() if calls else text_beside_calls), tuple(calls)


_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
"""The closing tag of the last call may be missing: a generation may stop at it, or reach its limit before it."""


def _parse_llama3_json(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    calls: list[ToolCall] = []
    rest = text.strip().removeprefix("<|python_tag|>").lstrip()
    while rest.startswith("{"):
        try:
            value, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            break
        if (call := _call_of(value)) is None:
            break
        calls.append(call)
        rest = rest[end:].lstrip("; \t\r\n")
    return (rest.strip(), tuple(calls)) if calls else (text, ())


_PARSERS: dict[ToolCallFormat, Callable[[str], tuple[str, tuple[ToolCall, ...]]]] = {
    "hermes": _parse_hermes,
    "llama3_json": _parse_llama3_json,
}


def _call_of(value: object) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    written = cast("dict[str, Any]", value)
    name = written.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        return None
    arguments = written.get("arguments", written.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as a JSON string
        return ToolCall(name=name, arguments=arguments)
    return ToolCall(name=name, arguments=json.dumps(arguments))


_NAME = re.compile(r"[\w.:/-]{1,128}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _decoded(text: str) -> object:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _written(call: ToolCall, key: str) -> str:
    arguments = _decoded(call.arguments)
    return json.dumps({"name": call.name, key: call.arguments if arguments is None else arguments}, ensure_ascii=False)
