"""Prints a sample token by token: sampled tokens coloured by probability, others dim."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.text import Text

from async_rl.config import Config
from async_rl.config.pretrained import described
from async_rl.errors import ConfigError
from async_rl.protocols import Tokenizer
from async_rl.tokenization.tokenizers import open_tokenizer
from async_rl.types import Rollout, Sample
from buffer.tools.output import print_table, visible

SHADES = ((0.9, "green"), (0.5, "cyan"), (0.1, "yellow"), (0.0, "red"))
"""Lowest probability of each colour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    position: int
    id: int
    text: str
    probability: float | None
    """Probability under the sampling distribution; None for a token that was not sampled."""
    version: int | None


def tokenizer_of(config: Config) -> Tokenizer | None:
    """Return the run's tokenizer; None if it cannot be opened here: then ids are shown."""
    try:
        return open_tokenizer(described(config.tokenizer))
    except ConfigError:
        return None


def tokens_of(sample: Sample, tokenizer: Tokenizer | None) -> Iterator[Token]:
    """Yield the tokens that all arrays have: a quarantined sample may be incomplete or have invalid version spans."""
    length = _length(sample)
    positions = range(length)
    version_of = {position: span.version for span in sample.versions for position in positions[span.start : span.stop]}
    chances = _chances(sample)
    for position, token_id in enumerate(sample.token_ids[:length].tolist()):
        yield Token(
            position=position,
            id=token_id,
            text=_text(token_id, tokenizer),
            probability=chances[position] if sample.loss_mask[position] else None,
            version=version_of.get(position),
        )


def print_tokens(page: Console, sample: Sample, tokenizer: Tokenizer | None) -> None:
    """Print coloured text, or one token per line where there are no colours."""
    tokens = list(tokens_of(sample, tokenizer))
    if page.color_system is not None and not page.no_color:
        page.print(_coloured(tokens))
        page.print(_legend())
        return
    rows = [
        (token.position, token.id, json.dumps(token.text, ensure_ascii=False), token.probability, token.version)
        for token in tokens
    ]
    print_table(page, ("position", "id", "text", "probability", "version"), rows)


def probabilities(rollout: Rollout) -> list[float]:
    return [
        chance
        for sample in rollout.samples
        for chance, sampled in zip(_chances(sample), sample.loss_mask.tolist(), strict=False)
        if sampled
    ]


def _length(sample: Sample) -> int:
    return min(len(sample.token_ids), len(sample.loss_mask), len(sample.logprobs))


def _chances(sample: Sample) -> list[float]:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.exp(sample.logprobs[: _length(sample)]).tolist()


def _text(token_id: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None or not 0 <= token_id < tokenizer.vocab_size:
        return f"<{token_id}>"
    return tokenizer.decode([token_id])


def _coloured(tokens: list[Token]) -> Text:
    text, version = Text(), None
    for token in tokens:
        if token.version is not None and token.version != version:
            version = token.version
            text.append(f"⟨v{version}⟩", "reverse")
        text.append(visible(token.text if token.text else f"<{token.id}>"), _style(token.probability))
    return text


def _legend() -> Text:
    text = Text("probability: ", "dim")
    for least, style in SHADES:
        text.append(f"≥ {least:g} ", style)
    return text.append("⟨v⟩", "reverse").append(" weights that sampled what follows; dim: not sampled", "dim")


def _style(probability: float | None) -> str:
    return "dim" if probability is None else next((style for least, style in SHADES if probability >= least), "red")
