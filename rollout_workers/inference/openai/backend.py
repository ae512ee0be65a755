"""Models behind any server that speaks OpenAI's protocol. What the server returns decides the class of the backend:

    ids, logprobs and versions (our gateway)    OpenAILogprobs    can be trained on
    ids (vLLM's return_token_ids)               OpenAITokens      evaluation, opponents, judges
    text                                        OpenAIText        the same

With a tokenizer prompts go as token ids to /completions; without one as messages to /chat/completions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from pydantic import ValidationError

from async_rl.config.evaluation import OpenAIPolicy
from async_rl.errors import ConfigError
from async_rl.protocols import ContextOverflow, GenerationArgs, Prompt, Returns, Tokenizer
from async_rl.tokenization.rendering import prompt_ids
from async_rl.tokenization.tokenizers import open_tokenizer
from async_rl.types import Completion
from rollout_workers.inference.interface import Inference
from rollout_workers.inference.openai.messages import MalformedResponse, ServedModels, body_of, first_choice
from rollout_workers.inference.openai.retrying_client import RetryingClient, ServerRefusal, ServerUnavailable
from rollout_workers.inference.transcript import Transcript, read

PROBE = "1"


@asynccontextmanager
async def open_openai(config: OpenAIPolicy) -> AsyncGenerator[OpenAIText]:
    """Open a served model, after one short request that shows what the server returns. Raises ConfigError."""
    async with RetryingClient.open(config) as client:
        try:
            model = config.model if config.model else await _only_model(client)
            tokenizer = open_tokenizer(config.tokenizer) if config.tokenizer is not None else Transcript()
            kind = OpenAIChat if isinstance(tokenizer, Transcript) else await _probe(client, model, tokenizer)
        except (ServerRefusal, ServerUnavailable, MalformedResponse, TimeoutError) as error:
            raise ConfigError(f"the server at {config.url} cannot be used: {error}") from error
        yield kind(client, model, config, tokenizer)


class OpenAIText(Inference):
    """Sends the prompt as text and reads text."""

    asks_for: Mapping[str, Any] = {}
    """Fields added to every request."""
    not_offered: tuple[str, ...] = ("top_k", "stop_token_ids")
    """Arguments outside OpenAI's protocol, which other servers may silently ignore."""

    def __init__(self, client: RetryingClient, model: str, config: OpenAIPolicy, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self._client = client
        self._defaults = config.sampling.generation_args
        self._loop = asyncio.get_running_loop()

    async def _generate(self, prompt: Prompt, args: GenerationArgs) -> Completion:
        chosen = args.over(self._defaults)
        for name in self.not_offered:
            if getattr(chosen, name):
                raise ValueError(f"{name} is not offered by the server at {self._client.url}; leave it unset")
        try:
            return await self._ask(prompt_ids(prompt, self.tokenizer), body_of(chosen) | {"model": self.model, **self.asks_for})
        except ServerRefusal as refused:
            if refused.code == "context_length_exceeded" or "maximum context length" in str(refused):
                raise ContextOverflow(f"the prompt is too long for the model {self.model}: {refused}") from refused
            raise

    async def _ask(self, token_ids: list[int], body: Mapping[str, Any]) -> Completion:
        choice = first_choice(await self._client.ask("/completions", {**body, "prompt": self.tokenizer.decode(token_ids)}))
        return choice.completion(choice.text, (), end_id=None)


class OpenAITokens(OpenAIText):
    """Sends and reads token ids: nothing is tokenized twice."""

    returns: Returns = "tokens"

    asks_for: Mapping[str, Any] = {"return_token_ids": True, "logprobs": 1, "include_stop_str_in_output": True}
    not_offered = ()

    async def _ask(self, token_ids: list[int], body: Mapping[str, Any]) -> Completion:
        choice = first_choice(await self._client.ask("/completions", {**body, "prompt": token_ids}))
        if choice.token_ids is None:
            raise MalformedResponse(f"the server at {self._client.url} returned token ids at first and does not any more")
        return choice.completion(choice.text, choice.token_ids, end_id=self.tokenizer.end_id)


class OpenAILogprobs(OpenAITokens):
    """Our own gateway: tokens come with their log-probabilities and versions."""

    returns: Returns = "logprobs"


class OpenAIChat(OpenAIText):
    """Sends messages and tools, for servers whose tokenizer is unknown. Ids are those of a transcript."""

    async def _ask(self, token_ids: list[int], body: Mapping[str, Any]) -> Completion:
        assert isinstance(self.tokenizer, Transcript)
        conversation = read(token_ids)
        request = {**body, "messages": conversation.messages}
        if conversation.tools:
            request["tools"] = conversation.tools
        choice = first_choice(await self._client.ask("/chat/completions", request))
        answer = self.tokenizer.answer(choice.message.content, choice.message.calls)
        return choice.completion(self.tokenizer.decode(answer), answer, end_id=None)


async def _only_model(client: RetryingClient) -> str:
    try:
        names = [model.id for model in ServedModels.model_validate(await client.ask("/models")).data]
    except ValidationError as error:
        raise MalformedResponse("its /models is not a list of models") from error
    if len(names) != 1:
        raise ConfigError(f"the server at {client.url} has these models: {', '.join(names)}; say which with `model`")
    return names[0]


async def _probe(client: RetryingClient, model: str, tokenizer: Tokenizer) -> type[OpenAIText]:
    body = {"model": model, "prompt": tokenizer.render(PROBE), "max_tokens": 1, **OpenAITokens.asks_for}
    try:
        choice = first_choice(await client.ask("/completions", body))
    except ServerRefusal as refused:
        if refused.status in (401, 403):
            raise
        return OpenAIText  # it does not accept token ids, or does not know the fields that ask for them
    if not choice.token_ids:
        return OpenAIText
    return OpenAILogprobs if choice.versions else OpenAITokens
