"""One generation while it is being sampled: its arguments, its tokens so far, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from async_rl.protocols import ContextOverflow, GenerationArgs, Tokenizer
from async_rl.types import Completion, StopReason, spans_of

GREEDY_BELOW = 1e-5
"""Below this temperature sampling is greedy: dividing logits by less would overflow float32."""
SMALLEST_TOP_P = 1e-9
"""Kernels compute in float32, in which less may be 0. One token is left in either case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The resolved arguments of one generation."""

    max_tokens: int
    temperature: float
    """0 is greedy."""
    top_p: float
    """1 means all."""
    top_k: int
    """0 means all."""
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    seed: int | None

    @property
    def is_truncated(self) -> bool:
        return self.top_p < 1 or self.top_k > 0


def resolve(args: GenerationArgs, *, prompt_length: int, context_tokens: int) -> Sampling:
    """Check and complete the arguments of one generation. Raises ValueError naming a wrong one, and ContextOverflow."""
    temperature = args.temperature if args.temperature is not None else 1.0
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature:g} must be 0 (greedy) or more")
    top_p = args.top_p if args.top_p is not None else 1.0
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p:g} must be above 0 and at most 1 (all tokens)")
    top_k = args.top_k if args.top_k is not None else 0
    if not 0 <= top_k < 2**31:
        raise ValueError(f"top_k={top_k} must be 0 (all tokens) or more, and fit into 31 bits")
    if args.seed is not None and not 0 <= args.seed < 2**63:
        raise ValueError(f"seed={args.seed} must be at least 0 and fit into 63 bits")
    if prompt_length == 0:
        raise ValueError("the prompt is empty: generation needs at least one token to continue")
    room = context_tokens - prompt_length
    if room < 1:
        raise ContextOverflow(
            f"the prompt has {prompt_length} tokens, and a sequence has at most {context_tokens} (model.max_sequence): no room "
            "for a continuation"
        )
    if args.max_tokens is not None and args.max_tokens < 1:
        raise ValueError(f"max_tokens={args.max_tokens} must be at least 1")
    return Sampling(
        max_tokens=min(args.max_tokens, room) if args.max_tokens is not None else room,
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_p=max(top_p, SMALLEST_TOP_P),
        top_k=top_k,
        stop=tuple(text for text in args.stop if text) if args.stop is not None else (),
        stop_token_ids=tuple(args.stop_token_ids) if args.stop_token_ids is not None else (),
        seed=args.seed,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class Generation:
    """The state of one generation. Only the engine's thread uses it once submitted."""

    id: int
    prompt: Sequence[int]
    sampling: Sampling
    finish: Callable[[Completion], object]
    random: torch.Generator | None = None
    """Its own random generator if it has a seed."""
    noise_seed: int | None = None
    """Seed of its noise in the Triton kernel, which needs no generator: its own, or one drawn for its first token."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    is_cancelled: bool = False
    submitted_at: float = 0.0
    """Time of time.perf_counter()."""
    queued_s: float = 0.0
    """Seconds from then until the step that sampled its first token."""

    def stop_reason(self, tokenizer: Tokenizer) -> StopReason | None:
        """The reason why the last token ends it; None if it continues."""
        token = self.token_ids[-1]
        if token == tokenizer.end_id:
            return StopReason.END
        if token in self.sampling.stop_token_ids:
            return StopReason.STOP
        if self.sampling.stop and self._shows_stop_string(tokenizer):
            return StopReason.STOP
        if len(self.token_ids) >= self.sampling.max_tokens:
            return StopReason.LENGTH
        return None

    def _shows_stop_string(self, tokenizer: Tokenizer) -> bool:
        """Look in the decoded text: a stop string may begin or end within a token."""
        # A token can be as little as one byte of text, so the newest stop string lies within this many tokens.
        reach = max(len(text.encode()) for text in self.sampling.stop) + _SLACK
        tail = tokenizer.decode(self.token_ids[-reach:])
        if not any(text in tail for text in self.sampling.stop):
            return False
        whole = tokenizer.decode(self.token_ids)
        return any(text in whole for text in self.sampling.stop)

    def completion(self, reason: StopReason, tokenizer: Tokenizer) -> Completion:
        readable = self.token_ids[:-1] if reason is StopReason.END else self.token_ids
        return Completion(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=spans_of(self.versions),
            stop_reason=reason,
            text=tokenizer.decode(readable),
            queued_s=self.queued_s,
        )


_SLACK = 16
"""Special tokens decode to nothing, and may stand between the bytes of a stop string."""
