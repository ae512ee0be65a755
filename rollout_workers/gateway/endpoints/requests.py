"""Fields that requests and responses share. Unknown fields are ignored, wrong ones refused by name."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from aiohttp import web
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    GetPydanticSchema,
    ValidationError,
    model_validator,
)
from pydantic_core.core_schema import no_info_after_validator_function

from async_rl.protocols import GenerationArgs
from async_rl.types import Completion, Message, Tool, ToolCall
from rollout_workers.gateway.request_errors import RequestError, malformed, not_offered
from rollout_workers.gateway.session import EpisodeSession, GatewayAnswer

Part = TypeVar("Part", bound="RequestFields")
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=-1, lt=2**31)]
"""Bounded, because these numbers end up in tensors."""


INSTEAD = {"top_logprobs": "answers carry the log-probabilities of their sampled tokens alone (logprobs: true); leave it out"}


class RequestFields(BaseModel):
    """Base of the bodies of requests and of their parts. A field that is null counts as absent."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    not_offered: ClassVar[Mapping[str, object]] = {}
    """Fields that would change the sampling and are refused, with the value that has no effect and is accepted."""

    @model_validator(mode="before")
    @classmethod
    def _given(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, harmless in cls.not_offered.items():
            if body.get(name) not in (None, harmless, {}, []):
                raise not_offered(name, INSTEAD.get(name, "leave it out"))
        return {name: value for name, value in body.items() if value is not None}


async def read_body(request: web.Request, kind: type[Part]) -> Part:
    body = await request.read()
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise malformed(error, body) from error


class SamplingFields(RequestFields):
    """Sampling arguments under the names of OpenAI and vLLM."""

    not_offered: ClassVar[Mapping[str, object]] = {
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "repetition_penalty": 1,
        "min_p": 0,
        "min_tokens": 0,
        "ignore_eos": False,
        "logit_bias": {},
        "use_beam_search": False,
        "prompt_logprobs": 0,
    }

    n: int = Field(default=1, ge=1)
    max_tokens: Count | None = None
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    top_k: Count | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[TokenId, ...] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**62)] | None = None

    @property
    def generation_args(self) -> GenerationArgs:
        return GenerationArgs(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,  # vLLM's value for all
            stop=(self.stop,) if isinstance(self.stop, str) else self.stop,
            stop_token_ids=self.stop_token_ids,
            seed=self.seed,
        )


class StreamOptions(RequestFields):
    include_usage: bool = False


class AnswerRequest(SamplingFields):
    """Fields of the requests for text."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False

    def head(self, session: EpisodeSession, prefix: str, kind: str) -> dict[str, Any]:
        """The first fields of a response."""
        model = self.model if self.model is not None else session.name
        return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}


def _flat(content: object) -> object:
    """Join content parts into one text. Raises ValueError for parts that are not text."""
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for part in content:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"a content part of type {kind!r} cannot be read: only text can")
        texts.append(text)
    return "".join(texts)


def _as_json(arguments: object) -> object:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


Text = Annotated[str, BeforeValidator(_flat)]
Role = Literal["system", "developer", "user", "assistant", "tool"]


class FunctionWire(RequestFields):
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}

    def tool(self) -> Tool:
        return Tool(name=self.name, description=self.description, parameters=self.parameters)


class CalledWire(RequestFields):
    name: str
    arguments: Annotated[str, BeforeValidator(_as_json)] = "{}"


class ToolCallWire(RequestFields):
    id: str = ""
    function: CalledWire

    def call(self) -> ToolCall:
        return ToolCall(name=self.function.name, arguments=self.function.arguments, id=self.id)


class MessageWire(RequestFields):
    role: Role
    content: Text = ""
    tool_calls: tuple[ToolCallWire, ...] = ()
    tool_call_id: str = ""

    def message(self) -> Message:
        return Message(
            role="system" if self.role == "developer" else self.role,
            content=self.content,
            tool_calls=tuple(call.call() for call in self.tool_calls),
            tool_call_id=self.tool_call_id,
        )


class FormatWire(RequestFields):
    """Only text: answers cannot be constrained to a schema."""

    type: Literal["text"] = "text"


class ToolWire(RequestFields):
    type: Literal["function"] = "function"
    function: FunctionWire


def read_as(kind: type[Part], convert: Callable[[Part], object]) -> GetPydanticSchema:
    """Validate a field as `kind`, then convert it."""
    return GetPydanticSchema(lambda _, handler: no_info_after_validator_function(convert, handler(kind)))


GivenMessage = Annotated[Message, read_as(MessageWire, MessageWire.message)]
GivenTool = Annotated[Tool, read_as(ToolWire, lambda tool: tool.function.tool())]


def parses_calls(tool_choice: object, tools: Sequence[Tool]) -> bool:
    """Return whether to parse calls in the answer. The prompt shows the tools either way, so that rows stay append-only."""
    if tool_choice not in (None, "auto", "none"):
        raise RequestError(
            400, f"tool_choice {tool_choice!r} cannot be enforced here; give 'auto' or 'none'", param="tool_choice"
        )
    return bool(tools) and tool_choice != "none"


def sampled_ids(completion: Completion) -> dict[str, Any]:
    """The sampled tokens and the version that sampled each span of them; positions count from the first sampled token."""
    return {"token_ids": completion.token_ids.tolist(), "versions": [asdict(span) for span in completion.versions]}


def usage(answers: Sequence[GatewayAnswer]) -> dict[str, int]:
    read = len(answers[0].turn.place.prompt)
    said = sum(len(answer.completion.token_ids) for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}
