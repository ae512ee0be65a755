"""Fields that requests and responses share. Unknown fields are ignored, wrong ones refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from aiohttp import web
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    field_validator,
    model_validator,
)

from async_rl.protocols import GenerationArgs
from async_rl.types import Completion, Message, Tool, ToolCall
from rollout_workers.gateway.request_errors import RequestError, malformed, not_offered
from rollout_workers.gateway.session import GatewayAnswer

Body = TypeVar("Body", bound="RequestFields")
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=-1, lt=2**31)]
"""Bounded, because these numbers end up in tensors."""


INSTEAD = {"top_logprobs": "answers carry the log-probabilities of their sampled tokens alone (logprobs: true); leave it out"}


class RequestFields(BaseModel):
    """Base of the bodies of requests and of their parts."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    not_offered: ClassVar[Mapping[str, object]] = {}
    """Fields that would change the sampling and are refused, with the value that has no effect and is accepted."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_not_offered(cls, body: Any) -> Any:
        if isinstance(body, dict):
            for name, harmless in cls.not_offered.items():
                if body.get(name) not in (None, harmless, {}, []):
                    raise not_offered(name, INSTEAD.get(name, "leave it out"))
        return body


async def read_body(request: web.Request, kind: type[Body]) -> Body:
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

    @field_validator("n", mode="before")
    @classmethod
    def _one_unless_said(cls, n: object) -> object:
        return 1 if n is None else n

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


def _flat(content: object) -> object:
    """Join content parts into one text. Raises ValueError for parts that are not text."""
    if content is None:
        return ""
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
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def tool(self) -> Tool:
        return Tool(
            name=self.name,
            description=self.description if self.description is not None else "",
            parameters=self.parameters if self.parameters is not None else {},
        )


class CalledWire(RequestFields):
    name: str
    arguments: Annotated[str, BeforeValidator(_as_json)] = "{}"


class ToolCallWire(RequestFields):
    id: str | None = None
    function: CalledWire

    def call(self) -> ToolCall:
        return ToolCall(name=self.function.name, arguments=self.function.arguments, id=self.id if self.id is not None else "")


class MessageWire(RequestFields):
    role: Role
    content: Text = ""
    tool_calls: tuple[ToolCallWire, ...] | None = None
    tool_call_id: str | None = None

    def message(self) -> Message:
        return Message(
            role="system" if self.role == "developer" else self.role,
            content=self.content,
            tool_calls=tuple(call.call() for call in self.tool_calls) if self.tool_calls is not None else (),
            tool_call_id=self.tool_call_id if self.tool_call_id is not None else "",
        )


class FormatWire(RequestFields):
    """Only text: answers cannot be constrained to a schema."""

    type: Literal["text"] = "text"


class ToolWire(RequestFields):
    type: Literal["function"] = "function"
    function: FunctionWire


class StreamOptions(RequestFields):
    include_usage: bool = False


def parses_calls(tool_choice: object, tools: Sequence[Tool]) -> bool:
    """Return whether to parse calls in the answer. The prompt shows the tools either way, so that rows stay append-only."""
    if tool_choice not in (None, "auto", "none"):
        raise RequestError(
            400, f"tool_choice {tool_choice!r} cannot be enforced here; give 'auto' or 'none'", param="tool_choice"
        )
    return bool(tools) and tool_choice != "none"


def versions_of(completion: Completion) -> list[dict[str, int]]:
    """The version that sampled each span of tokens; positions count from the first sampled token."""
    return [{"version": span.version, "start": span.start, "stop": span.stop} for span in completion.versions]


def usage(answers: Sequence[GatewayAnswer]) -> dict[str, int]:
    read = len(answers[0].turn.place.prompt)
    said = sum(len(answer.completion.token_ids) for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}
