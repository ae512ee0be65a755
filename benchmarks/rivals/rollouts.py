"""The rollouts that every side of buffer_speed.py moves, and how they are timed.

Numpy and the standard library only: this runs in every rival's virtual environment.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np

GROUP = 8
"""Rollouts of a group, which are moved together."""
WARM_UP = 64
"""Groups that pass, once all processes are connected, before the clock starts."""
VOCABULARY = 150_000
TEXT = "So the next even number is 42, because 40 was the last one and we only add two. " * 25
"""About 2 kB of conversation beside the arrays."""
PATIENCE_S = 120.0

Rollout = dict[str, Any]


def group_of(tokens: int, seed: int) -> list[Rollout]:
    """Return siblings with the same prompt (an eighth of the row) and different answers."""
    draw = np.random.default_rng(seed)
    prompt = max(1, tokens // 8)
    return [_rollout(draw, tokens, prompt) for _ in range(GROUP)]


def _rollout(draw: np.random.Generator, tokens: int, prompt: int) -> Rollout:
    logprobs = -draw.exponential(0.5, tokens).astype(np.float32)
    logprobs[:prompt] = 0
    return {
        "token_ids": draw.integers(0, VOCABULARY, tokens, np.int32),
        "loss_mask": (np.arange(tokens) >= prompt).astype(np.uint8),
        "logprobs": logprobs,
        "prompt": prompt,
        "text": TEXT,
        "reward": float(draw.random()),
        "version": 0,
    }


def check(rollout: Rollout, tokens: int) -> None:
    """The result that every reader must produce: arrays that can be trained on."""
    arrays = (rollout["token_ids"], rollout["loss_mask"], rollout["logprobs"])
    assert [(array.dtype.name, array.shape) for array in arrays] == [
        ("int32", (tokens,)),
        ("uint8", (tokens,)),
        ("float32", (tokens,)),
    ]


class Portions:
    """Yields the numbers of groups to move: a share of the warm-up, then, once all processes are connected, of the rest."""

    def __init__(self, barrier: Barrier, groups: int, shares: int) -> None:
        self._barrier = barrier
        self._sizes = WARM_UP // shares, groups // shares
        self.seconds = 0.0
        """Time of the second portion."""

    def __iter__(self) -> Iterator[int]:
        warm_up, rest = self._sizes
        yield warm_up
        self._barrier.wait(PATIENCE_S)
        started = time.perf_counter()
        yield rest
        self.seconds = time.perf_counter() - started


def rollouts_per_s(
    write: Callable[..., None], read: Callable[..., None], where: str, tokens: int, groups: int, writers: int
) -> float:
    """Return rollouts per second from the first write to the last array; writers are processes, the reader is this one."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(writers + 1)
    processes = [
        context.Process(target=write, args=(where, f"writer{index}", tokens, Portions(barrier, groups, writers)), daemon=True)
        for index in range(writers)
    ]
    for process in processes:
        process.start()
    try:
        portions = Portions(barrier, groups, 1)
        read(where, tokens, portions)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return groups * GROUP / portions.seconds


def parse_args(doc: str | None) -> argparse.Namespace:
    """Parse the arguments that buffer_speed.py passes to a rival."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of a rollout")
    parser.add_argument("--groups", type=int, default=64, help=f"of {GROUP} rollouts")
    parser.add_argument("--writers", type=int, default=1)
    parser.add_argument("--where", default="", help="the address of a server that is there already")
    return parser.parse_args()


def report(per_s: float) -> None:
    """Print the result as the last line of output."""
    print(json.dumps({"per_s": per_s}))
