"""The final number of an answer to a word problem."""

from __future__ import annotations

import re
from fractions import Fraction

_NUMBER = re.compile(
    r"(?:(?<![\w)])[-\u2212])?(?:\d{1,3}(?:,\d{3})+|\d{1,100})(?:\.\d{1,100})?(?:\s?/\s?\d{1,100})?|(?<!\d)\.\d{1,100}"
)
_MARKED = re.compile(r"\\boxed\{(?P<boxed>[^{}]*)\}|####(?P<after>[^\n]*)")
"""Where a response says which number is final. The last one counts."""


def final_number(text: str) -> Fraction | None:
    """The number in the last \\boxed{...} or after the last ####, else the last number in the text; None if there is none.

    Thousands may be separated by commas, and 3/4 is one number. Units and currencies beside it are ignored.
    """
    marked = [found["boxed"] or found["after"] or "" for found in _MARKED.finditer(text)]
    numbers = _NUMBER.findall(marked[-1] if marked else text)
    if not numbers:
        return None
    numerator, _, denominator = numbers[-1].replace(",", "").replace("\u2212", "-").partition("/")
    below = Fraction(denominator.strip()) if denominator else Fraction(1)
    return Fraction(numerator.strip()) / below if below else None
