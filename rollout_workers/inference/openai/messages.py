"""The fields that are read from responses of an OpenAI-compatible server. Other fields are ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from async_rl.protocols import GenerationArgs
from async_rl.types import Completion, StopReason, ToolCall, VersionSpan


class _Wire(BaseModel):
    """A field that is null counts as absent."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, fields: Any) -> Any:
        return {name: value for name, value in fields.items() if value is not None} if isinstance(fields, dict) else fields


class ResponseFunction(_Wire):
    name: str
    arguments: str = ""


class ResponseToolCall(_Wire):
    function: ResponseFunction


class ResponseMessage(_Wire):
    content: str = ""
    tool_calls: tuple[ResponseToolCall, ...] = ()

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(ToolCall(name=call.function.name, arguments=call.function.arguments) for call in self.tool_calls)


class ResponseLogprobs(_Wire):
    token_logprobs: tuple[float, ...] = ()
    """Those of /completions. /chat/completions has another form, which is not used."""


class ResponseChoice(_Wire):
    """One continuation, from either endpoint."""

    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """vLLM only: the stop string or token that ended it, if any."""
    text: str = ""
    message: ResponseMessage = ResponseMessage()
    token_ids: tuple[int, ...] | None = None
    logprobs: ResponseLogprobs = ResponseLogprobs()
    versions: tuple[VersionSpan, ...] = ()

    def completion(self, text: str, token_ids: Sequence[int], *, end_id: int | None) -> Completion:
        """Convert to a Completion. `end_id` None means that the ids do not show how it ended."""
        return Completion(
            token_ids=np.array(token_ids, np.int32),
            logprobs=np.array(self.logprobs.token_logprobs, np.float32),
            versions=self.versions,
            stop_reason=self._stop_reason(token_ids, end_id),
            text=text,
        )

    def _stop_reason(self, token_ids: Sequence[int], end_id: int | None) -> StopReason:
        if self.finish_reason == "length":
            return StopReason.LENGTH
        has_end = self.stop_reason is None if end_id is None else list(token_ids[-1:]) == [end_id]
        return StopReason.END if has_end else StopReason.STOP


class CompletionResponse(_Wire):
    choices: tuple[ResponseChoice, ...]


class ServedModel(_Wire):
    id: str


class ServedModels(_Wire):
    data: tuple[ServedModel, ...] = ()


class MalformedResponse(Exception):
    """A response does not follow the protocol."""


def first_choice(answer: Mapping[str, Any]) -> ResponseChoice:
    try:
        choices = CompletionResponse.model_validate(answer).choices
    except ValidationError as error:
        raise MalformedResponse(f"its response does not follow OpenAI's protocol: {error.errors()[0]['msg']}") from error
    if not choices:
        raise MalformedResponse("its response has no choices")
    return choices[0]


def body_of(args: GenerationArgs) -> dict[str, Any]:
    """The arguments that were set; everything else follows the server's defaults."""
    given = {name: value for name in args.__dataclass_fields__ if (value := getattr(args, name)) not in (None, ())}
    return {**given, "top_k": -1} if given.get("top_k") == 0 else given  # vLLM's value for all
