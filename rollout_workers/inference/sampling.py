"""Sample for all running generations at once, with log-probabilities under the distribution sampled from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from async_rl.megatron.truncation import truncate
from async_rl.protocols import Tokenizer
from rollout_workers.inference.generation import Generation


@dataclass(frozen=True, slots=True)
class _Batch:
    """The generations of a step, with their arguments as tensors. The same for all steps until one begins or ends."""

    requests: Sequence[int]
    generations: list[Generation]
    temperatures: Tensor
    """[requests, 1]; 1 for greedy ones."""
    is_random: Tensor | None
    """[requests, 1]; None: all are."""
    truncated: list[int]
    """Rows with top-k or top-p."""
    top_k: Tensor
    top_p: Tensor
    """Of the truncated rows."""
    seeded: list[tuple[int, torch.Generator]]
    """Rows with a random generator of their own."""

    @classmethod
    def of(cls, requests: Sequence[int], generations: list[Generation], device: torch.device) -> _Batch:
        sampling = [generation.sampling for generation in generations]
        temperatures = torch.tensor([each.temperature for each in sampling], device=device)[:, None]
        is_random = temperatures > 0
        truncated = [row for row, each in enumerate(sampling) if each.is_truncated]
        return cls(
            requests=requests,
            generations=generations,
            temperatures=torch.where(is_random, temperatures, 1.0),
            is_random=None if all(each.temperature > 0 for each in sampling) else is_random,
            truncated=truncated,
            top_k=torch.tensor([sampling[row].top_k for row in truncated], device=device),
            top_p=torch.tensor([sampling[row].top_p for row in truncated], device=device),
            seeded=[(row, each.random) for row, each in enumerate(generations) if each.random is not None],
        )


class BatchSampler:
    """Megatron's engine calls it once per step: `sample` for the tokens, `finished` for the generations that end."""

    def __init__(self, tokenizer: Tokenizer, *, device: torch.device, seed: int) -> None:
        self.version = -1
        self.tokens_generated = 0
        self.running: dict[int, Generation] = {}
        self.started: list[Generation] = []
        """Generations whose first token was sampled in the last step."""
        self.step_began = 0.0
        """When the engine's step began, by time.perf_counter(); set by the engine."""
        self._tokenizer = tokenizer
        self._random = torch.Generator(device).manual_seed(seed)
        self._batch = _Batch.of([], [], device)
        self._tokens: list[int] = []
        self._logprobs: list[float] = []

    def sample(self, logits: Tensor, requests: Sequence[int]) -> Tensor:
        self.started = []
        if requests != self._batch.requests:
            self._batch = _Batch.of(requests, [self.running[request] for request in requests], logits.device)
            self.started = [generation for generation in self._batch.generations if not generation.token_ids]
            for generation in self.started:
                generation.queued_s = max(0.0, self.step_began - generation.submitted_at)
        tokens, logprobs = _draw(logits, self._batch, self._noise(logits))
        self._tokens, self._logprobs = tokens.tolist(), logprobs.tolist()
        return tokens

    def finished(self, requests: Sequence[int]) -> set[int]:
        """Record the sampled tokens and deliver completions. Returns the finished requests."""
        assert requests == self._batch.requests, "tokens were sampled for other requests"
        end_id, version = self._tokenizer.end_id, self.version
        done: set[int] = set()
        # Runs for every token of every generation: no calls but for the few that may end.
        for generation, token, logprob in zip(self._batch.generations, self._tokens, self._logprobs, strict=True):
            if generation.is_cancelled:
                del self.running[generation.id]
                done.add(generation.id)
                continue
            generation.token_ids.append(token)
            generation.logprobs.append(logprob)
            generation.versions.append(version)
            self.tokens_generated += 1
            sampling = generation.sampling
            may_end = token == end_id or len(generation.token_ids) >= sampling.max_tokens
            if (may_end or sampling.stop_token_ids or sampling.stop) and self._ends(generation):
                done.add(generation.id)
        return done

    def drop_cancelled(self) -> list[Generation]:
        """Drop cancelled generations. Returns the others, oldest first."""
        self.running = {request: generation for request, generation in self.running.items() if not generation.is_cancelled}
        return list(self.running.values())

    def _ends(self, generation: Generation) -> bool:
        """Deliver the completion of a generation if its last token ends it."""
        reason = generation.stop_reason(self._tokenizer)
        if reason is None:
            return False
        del self.running[generation.id]
        generation.finish(generation.completion(reason, self._tokenizer))
        return True

    def _noise(self, logits: Tensor) -> Tensor:
        noise = torch.empty(logits.shape, device=logits.device).exponential_(generator=self._random)
        for row, random in self._batch.seeded:
            noise[row].exponential_(generator=random)
        return noise


def _draw(logits: Tensor, batch: _Batch, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and their float32 log-probabilities, from [requests, vocabulary] logits and standard exponential noise.

    The largest of log p + Gumbel noise is a sample of p; without the noise (temperature 0) it is the likeliest token, and
    its probability is 1.
    """
    scaled = logits.float() / batch.temperatures
    if batch.truncated:
        scaled[batch.truncated] = truncate(scaled[batch.truncated], batch.top_k, batch.top_p)
    logprobs = scaled.log_softmax(dim=-1)
    noisy = logprobs - noise.clamp_(min=torch.finfo(noise.dtype).tiny).log_()
    if batch.is_random is None:
        tokens = noisy.argmax(dim=-1, keepdim=True)
        return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]
    tokens = torch.where(batch.is_random, noisy, logprobs).argmax(dim=-1, keepdim=True)
    return tokens[:, 0], torch.where(batch.is_random, logprobs.gather(-1, tokens), 0.0)[:, 0]
