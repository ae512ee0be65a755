"""Sampling in plain torch, for CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from async_rl.megatron.truncation import truncate
from rollout_workers.inference.generation import Generation


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token for each row of logits."""

    tokens: Tensor
    """On the device."""
    on_host: Callable[[], tuple[list[int], list[float]]]
    """Wait for the device; tokens and their float32 log-probabilities."""


class TorchDraws:
    """Draws for the generations of a batch. The same for all steps until one begins or ends."""

    def __init__(self, generations: Sequence[Generation], device: torch.device, random: torch.Generator) -> None:
        """`random` makes the noise of generations without a seed."""
        sampling = [generation.sampling for generation in generations]
        temperatures = torch.tensor([each.temperature for each in sampling], device=device)[:, None]
        is_random = temperatures > 0
        self._random = random
        self._temperatures = torch.where(is_random, temperatures, 1.0)
        """[requests, 1]; 1 for greedy ones."""
        self._is_random = None if all(each.temperature > 0 for each in sampling) else is_random
        """[requests, 1]; None: all are."""
        self._truncated = [row for row, each in enumerate(sampling) if each.is_truncated]
        """Rows with top-k or top-p."""
        self._top_k = torch.tensor([sampling[row].top_k for row in self._truncated], device=device)
        self._top_p = torch.tensor([sampling[row].top_p for row in self._truncated], device=device)
        self._seeded = [(row, each.random) for row, each in enumerate(generations) if each.random is not None]
        """Rows with a random generator of their own."""

    def draw(self, logits: Tensor) -> Drawn:
        """Draw a token per row of logits [requests, vocabulary]."""
        tokens, logprobs = self._draw(logits)
        return Drawn(tokens, lambda: (tokens.tolist(), logprobs.tolist()))

    def _draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The largest of log p + Gumbel noise is a sample of p; without the noise (temperature 0) it is the likeliest token,
        and its probability is 1.
        """
        scaled = logits.float() / self._temperatures
        if self._truncated:
            scaled[self._truncated] = truncate(scaled[self._truncated], self._top_k, self._top_p)
        logprobs = scaled.log_softmax(dim=-1)
        noise = self._noise(logits)
        noisy = logprobs - noise.clamp_(min=torch.finfo(noise.dtype).tiny).log_()
        if self._is_random is None:
            tokens = noisy.argmax(dim=-1, keepdim=True)
            return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]
        tokens = torch.where(self._is_random, noisy, logprobs).argmax(dim=-1, keepdim=True)
        return tokens[:, 0], torch.where(self._is_random, logprobs.gather(-1, tokens), 0.0)[:, 0]

    def _noise(self, logits: Tensor) -> Tensor:
        """Standard exponential noise."""
        noise = torch.empty(logits.shape, device=logits.device).exponential_(generator=self._random)
        for row, random in self._seeded:
            noise[row].exponential_(generator=random)
        return noise
