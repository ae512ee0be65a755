"""Runs in grader processes only: math-verify wants a main thread, takes seconds to import, and may compute for ever."""

from math_verify import parse, verify  # pyright: ignore[reportMissingImports]


def is_same(answer: str, response: str) -> float:
    """Whether the last thing that is claimed in `response` means `answer`, which may be LaTeX without its dollar signs."""
    claimed = parse(response)
    return float(any(verify(parse(written), claimed) for written in (answer, f"${answer}$")))
