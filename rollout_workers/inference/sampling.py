"""Sample for all running generations at once, with log-probabilities under the distribution sampled from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from async_rl.megatron.truncation import truncate
from async_rl.protocols import Tokenizer
from rollout_workers.inference.generation import Generation, Sampling


class BatchSampler:
    """Megatron's engine calls it once per step: `sample` for the tokens, `finished` for the generations that end."""

    def __init__(self, tokenizer: Tokenizer, *, device: torch.device, seed: int) -> None:
        self.version = -1
        self.tokens_generated = 0
        self.running: dict[int, Generation] = {}
        self.started: list[Generation] = []
        """Generations whose first token was sampled in the last step."""
        self._tokenizer = tokenizer
        self._random = torch.Generator(device).manual_seed(seed)
        self._sampled: list[tuple[int, float]] = []

    def sample(self, logits: Tensor, requests: Sequence[int]) -> Tensor:
        generations = [self.running[request] for request in requests]
        self.started = [generation for generation in generations if not generation.token_ids]
        tokens, logprobs = draw(logits, [generation.sampling for generation in generations], self._noise(logits, generations))
        self._sampled = list(zip(tokens.tolist(), logprobs.tolist(), strict=True))
        return tokens

    def finished(self, requests: Sequence[int]) -> set[int]:
        """Record the sampled tokens and deliver completions. Returns the finished requests."""
        done: set[int] = set()
        for request, (token, logprob) in zip(requests, self._sampled, strict=True):
            if self._ends(self.running[request], token, logprob):
                done.add(request)
        return done

    def drop_cancelled(self) -> list[Generation]:
        """Drop cancelled generations. Returns the others, oldest first."""
        self.running = {request: generation for request, generation in self.running.items() if not generation.is_cancelled}
        return list(self.running.values())

    def _ends(self, generation: Generation, token: int, logprob: float) -> bool:
        if generation.is_cancelled:
            del self.running[generation.id]
            return True
        generation.extend(token, logprob, self.version)
        self.tokens_generated += 1
        reason = generation.stop_reason(self._tokenizer)
        if reason is None:
            return False
        del self.running[generation.id]
        generation.finish(generation.completion(reason, self._tokenizer))
        return True

    def _noise(self, logits: Tensor, generations: Sequence[Generation]) -> Tensor:
        noise = torch.empty(logits.shape, device=logits.device).exponential_(generator=self._random)
        for row, generation in enumerate(generations):
            if generation.random is not None:
                noise[row].exponential_(generator=generation.random)
        return noise


def draw(logits: Tensor, sampling: Sequence[Sampling], noise: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and their float32 log-probabilities, from [requests, vocabulary] logits and standard exponential noise.

    The largest of log p + Gumbel noise is a sample of p; without the noise (temperature 0) it is the likeliest token, and
    its probability is 1.
    """
    temperatures = torch.tensor([each.temperature for each in sampling], device=logits.device)
    is_random = (temperatures > 0)[:, None]
    scaled = logits.float() / torch.where(is_random, temperatures[:, None], 1.0)
    if truncated := [row for row, each in enumerate(sampling) if each.is_truncated]:
        top_k = torch.tensor([sampling[row].top_k for row in truncated], device=logits.device)
        top_p = torch.tensor([sampling[row].top_p for row in truncated], device=logits.device)
        scaled[truncated] = truncate(scaled[truncated], top_k, top_p)
    logprobs = scaled.log_softmax(dim=-1)
    gumbel = -noise.clamp_(min=torch.finfo(noise.dtype).tiny).log_()
    tokens = torch.where(is_random, logprobs + gumbel, logprobs).argmax(dim=-1, keepdim=True)
    chosen = torch.where(is_random, logprobs.gather(-1, tokens), 0.0)
    return tokens[:, 0], chosen[:, 0]
