"""A user's policy loss: a function that receives the arguments of `policy_loss` that it names.

def my_loss(current, behaviour, advantages, mask, normaliser):
    ratio = (current - behaviour).exp()
    return -(ratio.sqrt() * advantages * mask).sum() / normaliser.tokens
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from async_rl.errors import ConfigError
from async_rl.imports.references import load_reference
from learner.losses.aggregation import count
from learner.losses.config import PolicyLossConfig
from learner.losses.diagnostics import POLICY
from learner.losses.functions import Loss, policy_loss

ARGUMENTS = tuple(inspect.signature(policy_loss).parameters)[1:]
"""The arguments a loss may name: all of `policy_loss` after its config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoss:
    """A user's loss function, called like `policy_loss`."""

    function: Callable[..., object]
    """Returns a `Loss` or a differentiable scalar tensor."""
    takes: frozenset[str]
    """The names it takes, a subset of ARGUMENTS. `proximal`, `reference` and `entropy` are computed only if named."""

    @staticmethod
    def of(given: object) -> OwnLoss:
        """Load a function, `module:function` or `file.py:function`, and try it on a few tokens. Raises ConfigError."""
        if isinstance(given, OwnLoss):
            return given
        function = load_reference(given) if isinstance(given, str) else given
        name = given if isinstance(given, str) else getattr(function, "__name__", repr(function))
        if not callable(function):
            raise ConfigError(f"{name} is not a function, but {type(function).__name__}")
        own = OwnLoss(function=function, takes=_names_of_arguments(name, function))
        try:
            own(**_few_tokens()).loss.backward()
        except Exception as error:  # user code may raise anything
            raise ConfigError(f"{name} fails on a few tokens ({type(error).__name__}: {error})") from error
        return own

    def __call__(self, **given: Any) -> Loss:
        made = self.function(**{name: given.get(name) for name in self.takes})
        if isinstance(made, Loss):
            return made if made.totals.names == POLICY else _with_diagnostics(made.loss, given)
        return _with_diagnostics(made, given)


def _names_of_arguments(name: str, function: Callable[..., Any]) -> frozenset[str]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} has no readable signature: {error}") from error
    named = {each.name: each for each in parameters.values() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}
    for unknown in named.keys() - set(ARGUMENTS):
        if named[unknown].default is inspect.Parameter.empty:
            near = get_close_matches(unknown, ARGUMENTS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(ARGUMENTS)}"
            raise ConfigError(f"{name} asks for {unknown!r}, which is not an argument of losses; {hint}")
    return frozenset(named.keys() & set(ARGUMENTS))


def _with_diagnostics(loss: object, given: Mapping[str, Any]) -> Loss:
    """Attach the diagnostics that REINFORCE reports for the same tokens: they do not depend on the loss."""
    if not isinstance(loss, Tensor) or loss.ndim > 0:
        found = f"one of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise TypeError(f"a loss must be a scalar tensor, not {found}")
    with torch.no_grad():
        plain = policy_loss(PLAIN, **given)
    sums = plain.totals.sums.clone()
    for name in ("loss", "surrogate"):
        sums[POLICY.sums.index(name)] = loss.detach().double()
    return replace(plain, loss=loss, totals=replace(plain.totals, sums=sums))


PLAIN = PolicyLossConfig.model_validate({"surrogate": "reinforce"})


def _few_tokens() -> dict[str, Any]:
    """Arguments for a try-out: two answers, and a sequence without trained tokens."""
    mask, cu_seqlens, group_ids = torch.tensor([1, 1, 0, 1, 0, 0]), torch.tensor([0, 3, 5, 6]), torch.tensor([0, 0, 1])
    behaviour = torch.tensor([-0.5, -1.0, 0.0, -2.0, 0.0, 0.0])
    return {
        "current": (behaviour * 1.1).requires_grad_(),
        "behaviour": behaviour,
        "advantages": torch.tensor([1.0, 1.0, 0.0, -1.0, 0.0, 0.0]),
        "mask": mask,
        "cu_seqlens": cu_seqlens,
        "proximal": behaviour * 1.05,
        "reference": behaviour * 0.9,
        "entropy": torch.ones(6, requires_grad=True),
        "ages": torch.tensor([1, 0, 0, 2, 0, 0]),
        "group_ids": group_ids,
        "normaliser": count(mask=mask, cu_seqlens=cu_seqlens, group_ids=group_ids),
    }
