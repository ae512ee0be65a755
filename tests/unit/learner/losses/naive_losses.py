"""Losses as one writes them on paper: loops over sequences and tokens in float64, differentiated by autograd.

Shares nothing with learner/, configuration included: choices are plain dictionaries, with every field given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Token:
    """Only `c` and `entropy` are differentiated."""

    c: Tensor
    entropy: Tensor
    b: float
    p: float
    q: float
    advantage: float
    age: int


@dataclass(frozen=True, kw_only=True)
class Sequence:
    group: int
    tokens: list[Token]
    """The trained ones."""


def naive_policy_loss(choices: dict[str, Any], sequences: Iterable[Sequence]) -> Tensor:
    step = [sequence for sequence in sequences if sequence.tokens]
    total = torch.zeros((), dtype=torch.float64)
    for sequence in step:
        anchors = [_anchor(choices, token) for token in sequence.tokens]
        for place, token in enumerate(sequence.tokens):
            loss = choices["kl"]["coefficient"] * _kl(choices["kl"], token) - choices["entropy_coefficient"] * token.entropy
            if _is_kept(choices, sequence, token):
                weight = _correction(choices["correction"], sequence, anchors, place)
                loss = loss + weight * _surrogate(choices["surrogate"], sequence, anchors, place)
            total = total + loss / _denominator(choices["aggregation"], step, sequence)
    return total


def _anchor(choices: dict[str, Any], token: Token) -> float:
    if choices["anchor"] == "behaviour":
        return token.b
    if choices["proximal_source"] == "recompute":
        return token.p
    alpha = min(max((token.age - 1) / token.age, 0.0), 1.0) if token.age else 0.0
    return token.b + alpha * (token.c.item() - token.b)


def _denominator(aggregation: dict[str, Any], step: list[Sequence], sequence: Sequence) -> float:
    match aggregation["type"]:
        case "token_mean":
            return sum(len(each.tokens) for each in step)
        case "sequence_mean_token_mean":
            return len(step) * len(sequence.tokens)
        case "sequence_mean_token_sum":
            return len(step)
        case "sequence_sum_norm":
            return len(step) * aggregation["length"]
    siblings = [len(each.tokens) for each in step if each.group == sequence.group]
    return len({each.group for each in step}) * sum(siblings)


def _clamp(x: float) -> float:
    return min(max(x, -20.0), 20.0)


def _exp(x: Tensor) -> Tensor:
    """Gradient of a clamped log-ratio: 0 where the clamp is active."""
    return torch.exp(x) if abs(x.item()) < 20 else torch.tensor(math.exp(_clamp(x.item())), dtype=torch.float64)


def _surrogate(surrogate: dict[str, Any], sequence: Sequence, anchors: list[float], place: int) -> Tensor:
    token = sequence.tokens[place]
    a, c = token.advantage, token.c
    r = _exp(c - anchors[place])
    match surrogate["type"]:
        case "gspo":
            s = _exp(sum(each.c - anchor for each, anchor in zip(sequence.tokens, anchors, strict=True)) / len(anchors))
            return _clipped(s, a, surrogate["clip_low"], surrogate["clip_high"], None)
        case "ppo_clip":
            return _clipped(r, a, surrogate["clip_low"], surrogate["clip_high"], surrogate["dual_clip"])
        case "cispo":
            return -min(max(r.item(), surrogate["floor"]), surrogate["cap"]) * a * c
        case "dppo":
            gone = _went_too_far(surrogate["divergence"], token, surrogate["low"], surrogate["high"])
            return 0 * c if gone else -a * r
        case "sapo":
            tau = surrogate["tau_positive"] if a > 0 else surrogate["tau_negative"]
            return -a * (4 / tau) / (1 + torch.exp(-tau * (r - 1)))
        case "topr":
            return -(1.0 if a > 0 else min(r.item(), surrogate["cap"])) * a * c
        case "importance":
            return -a * r
    return -a * c


def _clipped(r: Tensor, a: float, low: float, high: float, dual: float | None) -> Tensor:
    if a > 0 and r.item() > 1 + high:
        return torch.tensor(-(1 + high) * a, dtype=torch.float64)
    if a < 0 and r.item() < 1 - low:
        return torch.tensor(-(1 - low) * a, dtype=torch.float64)
    if dual is not None and a < 0 and r.item() > dual:
        return torch.tensor(-dual * a, dtype=torch.float64)
    return -r * a


def _went_too_far(divergence: str, token: Token, low: float, high: float) -> bool:
    pi, mu = math.exp(token.c.item()), math.exp(token.b)
    if divergence == "tv":
        far = abs(pi - mu)
    else:
        others = math.log((1 - mu + 1e-8) / (1 - pi + 1e-8))
        far = mu * (token.b - token.c.item()) + (1 - mu) * others
    return (far > high and pi > mu) if token.advantage > 0 else (far > low and pi < mu)


def _correction(correction: dict[str, Any], sequence: Sequence, anchors: list[float], place: int) -> float:
    if correction["type"] == "none":
        return 1.0
    logs = [anchor - token.b for token, anchor in zip(sequence.tokens, anchors, strict=True)]
    w, product, geometric = (math.exp(_clamp(x)) for x in (logs[place], sum(logs), sum(logs) / len(logs)))
    low, high = correction["low"], correction["high"]
    if correction["type"] == "truncate":
        return min(max(w if correction["level"] == "token" else product, low), high)
    if correction["type"] == "mask":
        return w if low <= w <= high else 0.0
    statistic = geometric if correction["statistic"] == "geometric" else product
    return {"raw": w, "statistic": statistic, "one": 1.0}[correction["weight"]] if low <= statistic <= high else 0.0


def _is_kept(choices: dict[str, Any], sequence: Sequence, token: Token) -> bool:
    if choices["veto"] is not None:
        ratios = [math.exp(_clamp(each.c.item() - each.b)) for each in sequence.tokens]
        if min(ratios) < choices["veto"]["min_ratio"]:
            return False
    for mask in choices["trust_mask"]:
        if mask["type"] == "tv" and _went_too_far("tv", token, mask["low"], mask["high"]):
            return False
        if mask["type"] == "off_policy_sequence_mask" and token.advantage < 0:
            lost = sum(each.b - each.c.item() for each in sequence.tokens) / len(sequence.tokens)
            if lost > mask["delta"]:
                return False
    return True


def _kl(kl: dict[str, Any], token: Token) -> Tensor:
    d = token.c - token.q
    if abs(d.item()) > 20:
        d = torch.tensor(_clamp(d.item()), dtype=torch.float64)
    k = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) + d - 1}[kl["estimator"]]
    return k * torch.exp(token.c - token.c.item()) if kl["unbiased"] else k
