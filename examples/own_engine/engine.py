"""An inference engine of one's own: transformers, one token of one generation at a time, without a KV cache."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from async_rl.megatron.huggingface.tensors import huggingface_tensors
from async_rl.megatron.parameters.full_parameters import check_complete
from async_rl.models.hf_config import written_config
from async_rl.protocols import GenerationArgs, Prompt
from async_rl.tokenization.rendering import prompt_ids
from async_rl.types import Completion
from rollout_workers import Inference
from rollout_workers.inference.generation import Generation, resolve
from rollout_workers.inference.rollout_engine import EngineMetrics, EngineSetup


class PlainEngine(Inference):
    returns = "logprobs"
    metrics = EngineMetrics()

    def __init__(self, setup: EngineSetup) -> None:
        self.tokenizer, self.device, self.version = setup.tokenizer, setup.devices[0], -1
        self._shape, self._defaults = setup.shape, setup.sampling
        self._random = torch.Generator(self.device).manual_seed(setup.seed)
        loader: Any = AutoModelForCausalLM
        config = AutoConfig.for_model(**written_config(setup.shape, dtype=str(setup.dtype).removeprefix("torch.")))
        self._model = loader.from_config(config, dtype=setup.dtype).to(self.device).eval()
        self._thread = ThreadPoolExecutor(max_workers=1)  # weights change between two tokens, never while one is computed
        self._has_weights, self._closed = asyncio.Event(), asyncio.Event()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._closed.set()

    async def watch(self) -> None:
        await self._closed.wait()

    async def swap(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        check_complete(self._shape, tensors)
        if version <= self.version:
            raise ValueError(f"version {version} is not above {self.version}")
        await self._loop.run_in_executor(self._thread, self._load, version, tensors)
        self._has_weights.set()

    async def _generate(self, prompt: Prompt, args: GenerationArgs) -> Completion:
        row = prompt_ids(prompt, self.tokenizer)
        sampling = resolve(args.over(self._defaults), prompt_length=len(row), context_tokens=self._shape.context_tokens)
        if (
            sampling.top_k > 0 or sampling.top_p < 1 or sampling.seed is not None
        ):  # refused: the log-probabilities would be wrong
            raise ValueError("PlainEngine does not support top_k, top_p and seed; leave them unset")
        so_far = Generation(id=0, prompt=row, sampling=sampling, finish=print)
        await self._has_weights.wait()
        reason = None
        while reason is None:  # a cancelled call ends here, after the token that is being computed
            whole = [*row, *so_far.token_ids]
            token, logprob, version = await self._loop.run_in_executor(self._thread, self._next, whole, sampling.temperature)
            so_far.token_ids.append(token)
            so_far.logprobs.append(logprob)
            so_far.versions.append(version)
            reason = so_far.stop_reason(self.tokenizer)
        return so_far.completion(reason, self.tokenizer)

    # -- on the thread ----------------------------------------------------------------------------------------------------

    def _load(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self._model.load_state_dict(dict(huggingface_tensors(tensors, self._shape)), strict=False)  # without tied lm_head
        self.version = version

    @torch.inference_mode()
    def _next(self, row: Sequence[int], temperature: float) -> tuple[int, float, int]:
        logits = self._model(torch.tensor([row], device=self.device), logits_to_keep=1).logits[0, -1].float()
        if temperature == 0:
            return int(logits.argmax()), 0.0, self.version
        logprobs = (logits / temperature).log_softmax(dim=-1)
        token = int(torch.multinomial(logprobs.exp(), 1, generator=self._random))
        return token, float(logprobs[token]), self.version
