"""Text of workers, models and logs made safe to show: control characters become visible ones."""

from __future__ import annotations

_PASSED = {ord("\n"), ord("\t")}
_BIDI = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that change the direction of text."""
_PICTURES = {
    **{code: chr(0x2400 + code) for code in range(32) if code not in _PASSED},
    **dict.fromkeys((0x7F, *range(0x80, 0xA0), *_BIDI), "\N{REPLACEMENT CHARACTER}"),
}


def visible(text: str) -> str:
    """Replace control characters by visible ones."""
    return text.translate(_PICTURES)


def shortened(text: str, most: int) -> str:
    """The beginning of a text, with the number of characters that are left out."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"
