"""Sample for all running generations at once, with log-probabilities under the distribution sampled from."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from async_rl.megatron.attention.paged_attention import Kernels, uses_triton
from async_rl.protocols import Tokenizer
from rollout_workers.inference.generation import Generation
from rollout_workers.inference.torch_draws import Drawn, TorchDraws


class BatchSampler:
    """Megatron's engine calls it once per step: `sample` for the tokens, `finished` for the generations that end.

    Between the two the host may do something else: `sample` does not wait for the device.
    """

    def __init__(self, tokenizer: Tokenizer, *, device: torch.device, seed: int, kernels: Kernels = "auto") -> None:
        self.version = -1
        """That of the engine's weights."""
        self.tokens_generated = 0
        self.running: dict[int, Generation] = {}
        self.started: list[Generation] = []
        """Generations whose first token was sampled in the last step."""
        self.step_began = 0.0
        """When the engine's step began, by time.perf_counter(); set by the engine."""
        self._tokenizer = tokenizer
        self._requests: Sequence[int] = []
        self._generations: list[Generation] = []
        """Generations of `_requests`."""
        self._make_draw = _with_triton(device, seed) if uses_triton(device, kernels) else _with_torch(device, seed)
        self._draw = self._make_draw([])
        self._drawn: Drawn | None = None
        """Tokens that are not on the host yet."""
        self._drawn_by = -1
        """Version of the weights that the last logits are of."""
        self._tokens: list[int] = []
        self._logprobs: list[float] = []

    def sample(self, logits: Tensor, requests: Sequence[int], *, version: int) -> Tensor:
        self.started = []
        if requests != self._requests:
            self._requests, self._generations = requests, [self.running[request] for request in requests]
            self._draw = self._make_draw(self._generations)
            self.started = [generation for generation in self._generations if not generation.token_ids]
            for generation in self.started:
                generation.queued_s = max(0.0, self.step_began - generation.submitted_at)
        self._drawn, self._drawn_by = self._draw(logits), version
        return self._drawn.tokens

    def sampled(self) -> list[int]:
        if self._drawn is not None:
            self._tokens, self._logprobs = self._drawn.on_host()
            self._drawn = None
        return self._tokens

    def finished(self, requests: Sequence[int]) -> set[int]:
        """Record the sampled tokens and deliver completions. Returns the finished requests."""
        assert requests == self._requests, "tokens were sampled for other requests"
        tokens, end_id, version = self.sampled(), self._tokenizer.end_id, self._drawn_by
        done: set[int] = set()
        # Runs for every token of every generation: no calls but for the few that may end.
        for generation, token, logprob in zip(self._generations, tokens, self._logprobs, strict=True):
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


Draw = Callable[[Tensor], Drawn]


def _with_torch(device: torch.device, seed: int) -> Callable[[Sequence[Generation]], Draw]:
    noise = torch.Generator(device).manual_seed(seed)
    return lambda generations: TorchDraws(generations, device, noise).draw


def _with_triton(device: torch.device, seed: int) -> Callable[[Sequence[Generation]], Draw]:
    from rollout_workers.inference.sampling_kernels import TritonDraws  # late: not everyone has Triton

    seeds = random.Random(seed)
    return lambda generations: TritonDraws(generations, device, seeds).draw
