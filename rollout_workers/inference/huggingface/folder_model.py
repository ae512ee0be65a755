"""A Hugging Face folder run by transformers' `generate`: for evaluation, and as a reference for the Megatron engine.

One generation at a time, on a thread of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_rl.errors import ConfigError
from async_rl.protocols import ContextOverflow, GenerationArgs, Prompt, Returns, Tokenizer
from async_rl.supervision import working
from async_rl.tokenization.rendering import prompt_ids
from async_rl.types import Completion, StopReason
from rollout_workers.inference.interface import Inference


@asynccontextmanager
async def open_hf(
    folder: Path, tokenizer: Tokenizer, defaults: GenerationArgs, *, device: torch.device
) -> AsyncGenerator[HuggingFaceInference]:
    """Load the folder's model. Raises ConfigError when there is none."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="transformers") as thread:
        model = await asyncio.get_running_loop().run_in_executor(thread, _load, folder, device)
        yield HuggingFaceInference(model, tokenizer, defaults, thread)


class HuggingFaceInference(Inference):
    """Its tokens have log-probabilities but no version, because the model is not the trained one."""

    returns: Returns = "tokens"

    def __init__(self, model: Any, tokenizer: Tokenizer, defaults: GenerationArgs, thread: ThreadPoolExecutor) -> None:
        self.tokenizer = tokenizer
        self._model = model
        self._defaults = defaults
        self._thread = thread
        self._loop = asyncio.get_running_loop()

    async def _generate(self, prompt: Prompt, args: GenerationArgs) -> Completion:
        chosen, token_ids = args.over(self._defaults), prompt_ids(prompt, self.tokenizer)
        room = self._model.config.max_position_embeddings - len(token_ids)
        if room < 1:
            raise ContextOverflow(f"the prompt has {len(token_ids)} tokens, more than the model's context can answer")
        limit = min(room, chosen.max_tokens) if chosen.max_tokens is not None else room
        cancelled = threading.Event()
        try:
            return await self._loop.run_in_executor(self._thread, self._run, token_ids, chosen, limit, cancelled)
        finally:
            cancelled.set()  # a cancelled call frees the thread at the next token

    @working("a generation with transformers")
    def _run(self, token_ids: Sequence[int], args: GenerationArgs, limit: int, cancelled: threading.Event) -> Completion:
        is_random = args.temperature != 0
        stops = _Stops(self.tokenizer, len(token_ids), args, cancelled)
        drawn = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k if args.top_k is not None else 0}
        with torch.random.fork_rng(), torch.inference_mode():
            if args.seed is not None:
                torch.manual_seed(args.seed)
            output = self._model.generate(
                torch.tensor([token_ids], device=self._model.device),
                max_new_tokens=limit,
                do_sample=is_random,
                stopping_criteria=[stops],
                eos_token_id=self.tokenizer.end_id,
                pad_token_id=self.tokenizer.end_id,
                return_dict_in_generate=True,
                output_scores=True,
                **({name: value for name, value in drawn.items() if value is not None} if is_random else {}),
            )
        sampled = output.sequences[0, len(token_ids) :]
        scores = torch.stack(output.scores)[:, 0].float().log_softmax(dim=-1)
        logprobs = scores.gather(-1, sampled[:, None])[:, 0] if is_random else torch.zeros(len(sampled))
        ids: list[int] = sampled.tolist()
        has_ended = ids[-1:] == [self.tokenizer.end_id]
        return Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=logprobs.cpu().numpy().astype(np.float32),
            versions=(),
            stop_reason=StopReason.END if has_ended else StopReason.STOP if stops.has_stopped else StopReason.LENGTH,
            text=self.tokenizer.decode(ids[:-1] if has_ended else ids),
        )


class _Stops:
    """The stopping criterion transformers calls after each token."""

    def __init__(self, tokenizer: Tokenizer, prompt_length: int, args: GenerationArgs, cancelled: threading.Event) -> None:
        self.has_stopped = False
        self._tokenizer, self._prompt_length, self._cancelled = tokenizer, prompt_length, cancelled
        self._texts = args.stop if args.stop is not None else ()
        self._ids = args.stop_token_ids if args.stop_token_ids is not None else ()

    def __call__(self, sequences: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        sampled = sequences[0, self._prompt_length :].tolist()
        text = self._tokenizer.decode(sampled) if self._texts else ""
        self.has_stopped = sampled[-1] in self._ids or any(stop in text for stop in self._texts)
        return torch.tensor([self.has_stopped or self._cancelled.is_set()], device=sequences.device)


def _load(folder: Path, device: torch.device) -> Any:
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM  # imported late: it takes seconds

    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is no Hugging Face folder: it has no config.json")
    loader: Any = AutoModelForCausalLM
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # CPUs emulate bfloat16 at a hundredth of the speed
    try:
        model = loader.from_pretrained(folder, local_files_only=True, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} holds no model that transformers can load: {error}") from error
    return model.to(device).eval()
