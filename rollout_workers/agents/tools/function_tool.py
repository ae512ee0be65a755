"""A Python function as a tool: the JSON schema comes from its signature, the description from its docstring."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs, to_jsonable_python

from async_rl.errors import ConfigError
from async_rl.supervision.liveness.daemon_thread import in_daemon_thread
from async_rl.types import Tool
from rollout_workers.agents.tools.provider import ToolError


class FunctionTool:
    """Arguments are converted and checked by the annotations; `Annotated[int, Field(description=...)]` explains one.

    An async function runs on the event loop, a plain one in a thread, which it may block; no deadline can stop it there.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        name = getattr(function, "__name__", type(function).__name__)
        try:
            self._adapter: TypeAdapter[Any] = TypeAdapter(cast("Any", function))
            schema = self._adapter.json_schema()
        except (PydanticSchemaGenerationError, PydanticUserError, NameError) as error:
            raise ConfigError(f"tool {name!r} has a signature without a JSON schema: {error}") from error
        self._is_async = inspect.iscoroutinefunction(function)
        purpose = doc if (doc := inspect.getdoc(function)) is not None else ""
        self.tools: Sequence[Tool] = (Tool(name=name, description=purpose, parameters=_without_titles(schema)),)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        call = ArgsKwargs((), dict(arguments))
        try:
            if self._is_async:
                return _as_text(await self._adapter.validate_python(call))
            return _as_text(await in_daemon_thread(lambda: self._adapter.validate_python(call), name=f"tool {name}"))
        except ValidationError as error:
            raise ToolError("; ".join(_described(problem) for problem in error.errors(include_url=False))) from error
        except Exception as error:  # user code may raise anything; the model reads the error
            raise ToolError(f"{type(error).__name__}: {error}") from error


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(to_jsonable_python(value), ensure_ascii=False)


def _described(problem: Mapping[str, Any]) -> str:
    place = ".".join(str(step) for step in problem["loc"])
    return f"{place}: {problem['msg']}" if place else problem["msg"]


def _without_titles(schema: Any) -> Any:
    """Remove the `title` entries, which only repeat the names."""
    if isinstance(schema, list):
        return [_without_titles(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _without_titles(part) for key, part in schema.items() if key != "title" or not isinstance(part, str)}
