"""A rank that forms process groups over the group store: it prints the sum that all of them find.

usage: python group_rank.py URL RUN RANK
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from async_rl.config import Config
from buffer import open_group_stores


def main(url: str, run: str, rank: int) -> None:
    config = Config.model_validate(
        {
            "run": {"name": run},
            "model": {"size": {"hidden": 8, "layers": 1, "heads": 1, "ffn": 8}},
            "redis": {"url": url},
            "environments": [{"type": "even_digits"}],
        }
    )
    with open_group_stores(config) as stores:
        dist.init_process_group("gloo", store=stores.open("ranks"), rank=rank, world_size=2)
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        both, _ = dist.new_group([0, 1]), dist.new_group([1])
        dist.all_reduce(total, group=both)
        dist.barrier()
        dist.monitored_barrier()
        print(total.item())
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
