"""Pickled Python lists in a Redis stream, read with a cursor: how PipelineRL moves its rollouts.

One entry is one group. Nothing bounds the stream, nothing is acknowledged, and whoever can write to it can run code in
the reader. Writers are spared the conversion: their rollouts are lists from the beginning.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
from redis import Redis
from rollouts import Portions, check, group_of, parse_args, report, rollouts_per_s

STREAM = "rollouts"
TYPES = {"token_ids": np.int32, "loss_mask": np.uint8, "logprobs": np.float32}


def write(where: str, name: str, tokens: int, portions: Portions) -> None:
    group = [
        {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in rollout.items()}
        for rollout in group_of(tokens, seed=0)
    ]
    with Redis.from_url(where) as redis:
        for count in portions:
            for _ in range(count):
                redis.xadd(STREAM, {"writer": name, "data": pickle.dumps(group)})


def read(where: str, tokens: int, portions: Portions) -> None:
    cursor: Any = "0"
    with Redis.from_url(where) as redis:
        for count in portions:
            for _ in range(count):
                ((_, ((cursor, entry),)),) = redis.xread({STREAM: cursor}, count=1, block=0)  # pyright: ignore
                for rollout in pickle.loads(entry[b"data"]):
                    check(rollout | {key: np.array(rollout[key], kind) for key, kind in TYPES.items()}, tokens)


def main() -> None:
    args = parse_args(__doc__)
    report(rollouts_per_s(write, read, args.where, tokens=args.tokens, groups=args.groups, writers=args.writers))


if __name__ == "__main__":
    main()
