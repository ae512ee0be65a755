"""The text each sampled token adds. If a character takes several tokens, the last one has its text."""

from __future__ import annotations

from collections.abc import Sequence

from async_rl.protocols import Tokenizer
from async_rl.tokenization.tokenizers import Characters
from async_rl.types import Completion, StopReason

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers decode an incomplete character to."""


def complete_text(completion: Completion, tokenizer: Tokenizer) -> str:
    """The text of a completion, without a last character that a length limit cut."""
    is_cut = completion.stop_reason is StopReason.LENGTH and not isinstance(tokenizer, Characters)
    return completion.text.rstrip(INCOMPLETE) if is_cut else completion.text


def token_texts(completion: Completion, tokenizer: Tokenizer) -> list[str]:
    """Return one text for each token."""
    token_ids: Sequence[int] = completion.token_ids.tolist()
    if isinstance(tokenizer, Characters):
        return [tokenizer.decode([token]) for token in token_ids]
    found: list[str] = []
    begin = shown = 0  # decode with preceding tokens: some tokenizers drop a leading space
    before = now = ""
    for end in range(1, len(token_ids) + 1):
        before, now = tokenizer.decode(token_ids[begin:shown]), tokenizer.decode(token_ids[begin:end])
        if now.endswith(INCOMPLETE):
            found.append("")
        else:
            found.append(now[len(before) :])
            begin, shown = shown, end
    if shown < len(token_ids) and completion.stop_reason is not StopReason.LENGTH:
        found[-1] = now[len(before) :]  # not cut: the model sampled an incomplete character
    return found
