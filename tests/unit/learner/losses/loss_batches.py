"""Packed batches for the tests of losses, and every choice that a policy loss has."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.learner.losses.naive_losses import Sequence, Token

NONE: dict[str, Any] = {"type": "none"}
SURROGATES: list[dict[str, Any]] = [
    {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    {"type": "ppo_clip", "clip_low": 0.1, "clip_high": 0.1, "dual_clip": 1.5},
    {"type": "gspo", "clip_low": 0.05, "clip_high": 0.2},
    {"type": "cispo", "cap": 1.3, "floor": 0.8},
    {"type": "dppo", "divergence": "tv", "low": 0.05, "high": 0.1},
    {"type": "dppo", "divergence": "kl", "low": 0.02, "high": 0.01},
    {"type": "sapo", "tau_positive": 1.0, "tau_negative": 1.5},
    {"type": "topr", "cap": 0.9},
    {"type": "reinforce"},
    {"type": "importance"},
]
CORRECTIONS = [
    {"type": "truncate", "level": "token", "low": 0.9, "high": 1.2},
    {"type": "truncate", "level": "sequence", "low": 0.0, "high": 1.1},
    {"type": "mask", "low": 0.8, "high": 1.25},
    *(
        {"type": "sequence_mask", "statistic": statistic, "low": 0.8, "high": 1.2, "weight": weight}
        for statistic in ("geometric", "product")
        for weight in ("raw", "statistic", "one")
    ),
]
AGGREGATIONS = [
    {"type": "token_mean"},
    {"type": "sequence_mean_token_mean"},
    {"type": "sequence_mean_token_sum"},
    {"type": "sequence_sum_norm", "length": 7},
    {"type": "prompt_mean"},
]
TRUST_MASKS = [{"type": "tv", "low": 0.1, "high": 0.05}, {"type": "off_policy_sequence_mask", "delta": 0.05}]
KLS = [
    {"estimator": "k3", "coefficient": 0.0, "unbiased": False},
    *(
        {"estimator": estimator, "coefficient": 0.1, "unbiased": unbiased}
        for estimator in ("k1", "k2", "k3")
        for unbiased in (False, True)
    ),
]
ANCHORS = [
    {"anchor": "behaviour", "proximal_source": "recompute", "correction": NONE},
    *(
        {"anchor": "proximal", "proximal_source": source, "correction": correction}
        for source in ("recompute", "loglinear")
        for correction in (NONE, *CORRECTIONS)
    ),
]


def every_choice(surrogate: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    others = {
        "aggregation": st.sampled_from(AGGREGATIONS),
        "trust_mask": st.sampled_from([[], TRUST_MASKS[:1], TRUST_MASKS[1:], TRUST_MASKS]),
        "veto": st.sampled_from([None, {"min_ratio": 0.6}, {"min_ratio": 1e-4}]),
        "kl": st.sampled_from(KLS),
        "entropy_coefficient": st.sampled_from([0.0, 0.05]),
    }
    return st.builds(
        lambda anchored, rest: {"surrogate": surrogate, **anchored, **rest},
        st.sampled_from(ANCHORS),
        st.fixed_dictionaries(others),
    )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Ragged sequences, some of them without a token, and what no mask lets through is garbage."""

    current: Tensor
    entropy: Tensor
    behaviour: Tensor
    proximal: Tensor
    reference: Tensor
    advantages: Tensor
    ages: Tensor
    mask: Tensor
    lengths: list[int]
    group_ids: Tensor

    @property
    def slices(self) -> list[slice]:
        return [slice(a, b) for a, b in itertools.pairwise(itertools.accumulate(self.lengths, initial=0))]

    def part(self, chosen: list[int]) -> dict[str, Tensor]:
        """These sequences as one packed row."""
        places = [place for index in chosen for place in range(self.slices[index].start, self.slices[index].stop)]
        per_token = ("current", "entropy", "behaviour", "proximal", "reference", "advantages", "ages", "mask")
        return {name: getattr(self, name)[places] for name in per_token} | {
            "cu_seqlens": torch.tensor([0, *(self.lengths[index] for index in chosen)]).cumsum(0).int(),
            "group_ids": self.group_ids[chosen],
        }

    def whole(self) -> dict[str, Tensor]:
        return self.part(list(range(len(self.lengths))))

    def on_paper(self) -> list[Sequence]:
        current, entropy = self.current.unbind(), self.entropy.unbind()
        return [
            Sequence(group=int(group), tokens=[
                Token(
                    c=current[t], entropy=entropy[t], b=self.behaviour[t].item(), p=self.proximal[t].item(),
                    q=self.reference[t].item(), advantage=self.advantages[t].item(), age=int(self.ages[t]),
                )
                for t in range(tokens.start, tokens.stop) if self.mask[t]
            ])
            for group, tokens in zip(self.group_ids, self.slices, strict=True)
        ]  # fmt: skip


def random_batch(
    seed: int, lengths: list[int], *, density: float = 0.8, spread: float = 0.3, advantages: str = "token"
) -> Batch:
    """`spread` is how far policies lie apart; from 30 on many ratios are clamped."""
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    mask = torch.from_numpy((rng.random(total) < density).astype(np.uint8))

    def trained(values: np.ndarray) -> Tensor:
        return torch.where(mask != 0, torch.from_numpy(values), torch.nan)

    def near(logprobs: np.ndarray, distance: float) -> np.ndarray:
        return -np.abs(logprobs + rng.normal(0, distance, total))

    behaviour = -rng.exponential(1, total)
    proximal = near(behaviour, spread)
    given = {
        "token": rng.normal(0, 1, total),
        "sequence": np.repeat(rng.normal(0, 1, len(lengths)), lengths),
        "zero": np.zeros(total),
    }[advantages]
    return Batch(
        current=torch.from_numpy(near(proximal, spread / 2)).requires_grad_(),
        entropy=torch.from_numpy(rng.exponential(1, total)).requires_grad_(),
        behaviour=trained(behaviour),
        proximal=trained(proximal),
        reference=trained(near(behaviour, spread)),
        advantages=trained(given),
        ages=torch.from_numpy(rng.integers(0, 10, total).astype(np.int32)),
        mask=mask,
        lengths=lengths,
        group_ids=torch.from_numpy(np.sort(rng.integers(0, 3, len(lengths)))),
    )


def batches() -> st.SearchStrategy[Batch]:
    return st.builds(
        random_batch,
        st.integers(0, 2**32 - 1),
        st.lists(st.integers(0, 6), max_size=6),
        density=st.sampled_from([0.0, 0.5, 1.0]),
        spread=st.sampled_from([0.0, 0.02, 0.3, 0.3, 2.0, 40.0]),
        advantages=st.sampled_from(["token", "sequence", "zero"]),
    )
