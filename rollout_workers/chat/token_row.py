"""An append-only row of tokens: prompt, sampled tokens and observations of an episode, in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from async_rl.types import Completion, Sample, VersionSpan


class TokenRow:
    """Build the token row of an episode. Sampled tokens are appended as they were sampled, never tokenized again."""

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self._token_ids = list(prompt_ids)
        self._logprobs = [0.0] * len(self._token_ids)
        self._spans: list[VersionSpan] = []

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def token_ids(self) -> list[int]:
        """The whole row so far: the prompt of the next generation."""
        return list(self._token_ids)

    def add_given(self, token_ids: Iterable[int]) -> None:
        """Append tokens that the model reads but did not sample."""
        given = list(token_ids)
        self._token_ids += given
        self._logprobs += [0.0] * len(given)

    def add_sampled(self, completion: Completion) -> None:
        """Append a completion. Raises ValueError when its fields do not fit together."""
        _check(completion)
        offset = len(self._token_ids)
        self._token_ids += completion.token_ids.tolist()
        self._logprobs += completion.logprobs.tolist()
        for span in completion.versions:
            self._add_span(VersionSpan(version=span.version, start=offset + span.start, stop=offset + span.stop))

    def _add_span(self, span: VersionSpan) -> None:
        last = self._spans[-1] if self._spans else None
        if last is not None and last.version == span.version and last.stop == span.start:
            self._spans[-1] = VersionSpan(version=span.version, start=last.start, stop=span.stop)
        else:
            self._spans.append(span)

    def sample(self) -> Sample:
        """The row up to its last sampled token: the rest has nothing to train on."""
        length = self._spans[-1].stop if self._spans else len(self)
        loss_mask = np.zeros(length, np.uint8)
        for span in self._spans:
            loss_mask[span.start : span.stop] = 1
        return Sample(
            token_ids=np.array(self._token_ids[:length], np.int32),
            loss_mask=loss_mask,
            logprobs=np.array(self._logprobs[:length], np.float32),
            versions=tuple(self._spans),
        )


def _check(completion: Completion) -> None:
    """Refuse a completion whose fields contradict each other: it would put wrong ratios into the loss."""
    length = len(completion.token_ids)
    if (completion.text and not length) or (length and not completion.versions):
        raise ValueError(
            f"this model returns {'no versions of its weights' if length else 'text without token ids'}: "
            "it can be evaluated, not trained on"
        )
    if len(completion.logprobs) != length:
        raise ValueError(f"a completion of {length} tokens came with {len(completion.logprobs)} logprobs")
    if not _covers(completion.versions, length):
        spans = ", ".join(f"[{span.start}, {span.stop})" for span in completion.versions)
        raise ValueError(f"a completion of {length} tokens came with version spans that do not cover it: {spans}")


def _covers(spans: Sequence[VersionSpan], length: int) -> bool:
    """Return whether the spans are adjacent and cover 0 to `length`."""
    reached = 0
    for span in spans:
        if span.start != reached or span.stop <= span.start:
            return False
        reached = span.stop
    return reached == length
