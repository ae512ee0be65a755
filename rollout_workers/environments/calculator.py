"""Rows of a dataset, answered with a calculator that the model may call.

environments:
  - type: calculator
    args: {path: openai/gsm8k, subset: main, prompt: question, answer_after: "####", scoring: number, chat: true}
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollout_workers.agents.dataset import DatasetAgent
from rollout_workers.agents.tool_agent import ToolAgent
from rollout_workers.agents.tools.toolbox import AnyTools

LONGEST = 200
"""Characters of an expression."""
LARGEST = 1e15
"""Values beyond it are refused, so that no call takes long."""

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


@dataclass(kw_only=True)
class Calculator(DatasetAgent, ToolAgent):
    """A dataset whose prompts offer the tool `calculate`."""

    max_calls: int = 8

    def tools(self) -> Sequence[AnyTools]:
        return [calculate]


async def calculate(expression: str) -> str:
    """Compute an arithmetic expression of numbers, + - * / // % and parentheses, such as (12 + 3.5) * 4."""
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has more than {LONGEST} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from error
    return f"{value:.12g}"


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            found = float(number) if abs(number) <= LARGEST else LARGEST + 1
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            found = _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            found = _BINARY[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("only numbers, + - * / // % and parentheses can be computed")
    if abs(found) > LARGEST:
        raise ValueError(f"a value is larger than {LARGEST:g}")
    return found
