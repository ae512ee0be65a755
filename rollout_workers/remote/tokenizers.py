"""The run's tokenizer on an environment server, for agents that render prompts or read token ids."""

from __future__ import annotations

from functools import cache
from typing import Any

from async_rl.errors import ConfigError
from async_rl.protocols import Tokenizer
from async_rl.tokenization.tokenizers import Characters
from rollout_workers.remote.wire import WireMap

PROBE = "Ünder 7 trees, a fox said: «42!»\n\n"
"""Tokenizers of equal size that encode this alike are taken to be the same."""


_characters = cache(Characters)


def describe(tokenizer: Tokenizer) -> WireMap:
    """Describe a tokenizer: a character tokenizer completely, others by size and a sample encoding."""
    if isinstance(tokenizer, Characters):
        return {"alphabet": tokenizer.decode(range(tokenizer.num_special, tokenizer.vocab_size))}
    return {"vocab_size": tokenizer.vocab_size, "end_id": tokenizer.end_id, "probe": list(tokenizer.encode(PROBE))}


def tokenizer_for(described: WireMap, own: Tokenizer | None) -> Tokenizer:
    """The described tokenizer: made from its alphabet, or `own` if it matches. Raises ConfigError if `own` differs."""
    if isinstance(alphabet := described.get("alphabet"), str):
        return _characters(alphabet)
    if own is not None and describe(own) != described:
        raise ConfigError("the tokenizer of this environment server differs from the run's: --tokenizer must name the same one")
    return own if own is not None else MissingTokenizer(described)


class MissingTokenizer:
    """Raises ConfigError when an agent uses the tokenizer; most agents never do."""

    def __init__(self, described: WireMap) -> None:
        self.vocab_size: int = described.get("vocab_size", 0)
        self.end_id: int = described.get("end_id", -1)

    def _missing(self, *_: Any, **__: Any) -> Any:
        raise ConfigError("the run's tokenizer is not on this environment server: start it with --tokenizer FOLDER")

    encode = decode = render = render_reply = _missing
