"""Compare mathematics, in grader processes only: math-verify needs a main thread, imports for seconds and may hang."""

from math_verify import parse, verify  # pyright: ignore[reportMissingImports]


def is_same(answer: str, response: str) -> float:
    """1 if the final result in `response` equals `answer`, which may be LaTeX without dollar signs; else 0."""
    claimed = parse(response)
    return float(any(verify(parse(written), claimed) for written in (answer, f"${answer}$")))
