"""As a program under TRITON_INTERPRET=1: what the Triton sampler draws, beside what torch says of the same logits."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from async_rl.megatron.truncation import truncate
from async_rl.protocols import GenerationArgs
from rollout_workers.inference import sampling_kernels
from rollout_workers.inference.generation import Generation, Sampling, resolve
from rollout_workers.inference.sampling_kernels import TritonDraws

CPU = torch.device("cpu")
ARGUMENTS = (
    {}, {"temperature": 0.7}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3, "top_k": 5},
    {"top_p": 0.5, "top_k": 40}, {"top_k": 9999},
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LISTS = {"too many are near": (64, 12.0), "too few are near": (4096, 0.5)}
"""Length and reach of lists in which no cut can be searched."""
FEW = torch.tensor([2.0, 1.0, 1.0, 0.5, 0.0, -0.0, -1.0, 2.0])
TEMPERATURE, DRAWS, REPEATS = 1.3, 80, 5


def generation(**changed: Any) -> Generation:
    usual = {"max_tokens": 9, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop": (), "stop_token_ids": (), "seed": None}
    return Generation(id=0, prompt=[1], sampling=Sampling(**(usual | changed)), finish=print)


def torch_logprobs(logits: Tensor, generations: Sequence[Generation]) -> Tensor:
    """Log-probabilities of all tokens, -inf outside of top-k and top-p. A greedy row is not divided."""
    asked = [each.sampling for each in generations]
    temperatures = torch.tensor([each.temperature if each.temperature > 0 else 1.0 for each in asked])
    k, p = torch.tensor([each.top_k for each in asked]), torch.tensor([each.top_p for each in asked])
    return truncate(logits.float() / temperatures[:, None], k, p).log_softmax(-1)


def found(dtype: torch.dtype, most_near: int, near: float) -> dict[str, Any]:
    """Compare with torch. A token kept or cut by one of the two alone would change the log-probability of any that is drawn."""
    sampling_kernels.MOST_NEAR, sampling_kernels.NEAR = most_near, near
    generator = torch.Generator().manual_seed(0)
    generations = [generation(**arguments) for arguments in ARGUMENTS]
    logits = (3 * torch.randn(len(generations), 2500, generator=generator)).to(dtype)
    logits[:, 2499] = 1000.0  # the padding of a vocabulary, which lies behind the tokens of a row
    draws = TritonDraws(generations, CPU, random.Random(3))
    made = draws.draw(logits[:, :2499])
    tokens, (drawn, logprobs) = made.tokens, made.on_host()
    wanted = torch_logprobs(logits[:, :2499], generations)
    of_drawn = wanted.gather(1, tokens.long()[:, None])[:, 0]
    random_rows = torch.tensor([each.sampling.temperature > 0 for each in generations])
    return {
        "kept": [bool(kept) for kept in of_drawn.isfinite()],
        "difference": (of_drawn - torch.tensor(logprobs))[random_rows].abs().max().item(),
        "greedy": [logprobs[2], drawn[2] - int(logits[2, :2499].argmax())],
        "lists": drawn == tokens.tolist(),
    }


def counted() -> list[int]:
    """Count the tokens of a few logits, drawn with different seeds at several places."""
    sampling_kernels.PARTS = 2  # there are tokens for one
    draws = TritonDraws([generation(temperature=TEMPERATURE) for _ in range(DRAWS)], CPU, random.Random(11))
    tokens = [token for _ in range(REPEATS) for token in draws.draw(FEW.repeat(DRAWS, 1)).on_host()[0]]
    return torch.tensor(tokens).bincount(minlength=len(FEW)).tolist()


def seeded() -> dict[str, Any]:
    """The tokens of a seed: one after the other, in another row beside others, and from the middle."""

    def three(generations: list[Generation], row: int) -> list[int]:
        draws = TritonDraws(generations, CPU, random.Random(1))
        logits = torch.zeros(len(generations), 300)
        return [draws.draw(logits).on_host()[0][row] for _ in range(3)]

    later = generation(seed=5)
    alone = three([generation(seed=5)], 0)
    later.token_ids.append(alone[0])
    return {
        "alone": alone,
        "among": three([generation(), generation(seed=6), generation(seed=5)], 2),
        "other": three([generation(seed=6)], 0),
        "later": three([later], 0),
    }


def least() -> list[Any]:
    """The tokens of a `top_p` that is 0 in float32, those that are likeliest, and their log-probabilities."""
    sampling = resolve(GenerationArgs(top_p=1e-50), prompt_length=1, context_tokens=9)
    logits = 3 * torch.randn(3, 5000, generator=torch.Generator().manual_seed(5))
    drawn, logprobs = TritonDraws([generation(top_p=sampling.top_p)] * 3, CPU, random.Random(1)).draw(logits).on_host()
    return [list(drawn), logits.argmax(-1).tolist(), list(logprobs)]


if __name__ == "__main__":
    report = {
        "found": {
            **{str(dtype): found(dtype, 4096, 12.0) for dtype in DTYPES},
            **{name: found(torch.float32, *each) for name, each in LISTS.items()},
        },
        "counted": counted(),
        "seeded": seeded(),
        "least": least(),
    }
    print(json.dumps(report))
