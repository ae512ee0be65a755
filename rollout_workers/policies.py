"""Open the models of the `policies:` section: opponents, judges, simulated users. They are never trained."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import torch

from async_rl.config.evaluation import OpenAIPolicy, PolicyConfig
from async_rl.config.tokenizer import HuggingFaceTokenizer
from async_rl.errors import ConfigError
from async_rl.protocols import InferenceInterface
from async_rl.tokenization.tokenizers import open_tokenizer
from rollout_workers.inference.evaluation_inference import EvaluationInference
from rollout_workers.inference.huggingface.folder_model import open_hf
from rollout_workers.inference.openai.backend import open_openai


@asynccontextmanager
async def open_policies(
    configs: Mapping[str, PolicyConfig], *, device: torch.device
) -> AsyncGenerator[Mapping[str, InferenceInterface]]:
    """Open all of them for `EpisodeContext.policies`. Raises ConfigError when one cannot be reached or loaded."""
    async with AsyncExitStack() as opened:
        models: dict[str, InferenceInterface] = {}
        for name, config in configs.items():
            try:
                models[name] = EvaluationInference(await opened.enter_async_context(open_policy(config, device)))
            except ConfigError as error:
                raise ConfigError(f"policies.{name}: {error}") from error
        yield models


def open_policy(config: PolicyConfig, device: torch.device) -> AbstractAsyncContextManager[InferenceInterface]:
    """Open one policy. Its completions are what the backend returns, without placeholders."""
    if isinstance(config, OpenAIPolicy):
        return open_openai(config)
    tokenizer = open_tokenizer(HuggingFaceTokenizer(type="huggingface", folder=config.place))
    return open_hf(config.place, tokenizer, config.sampling.generation_args, device=device)
