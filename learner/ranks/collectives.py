"""What ranks tell each other, over the world's group with CPU tensors. Bytes only: nothing is unpickled."""

from __future__ import annotations

import torch
import torch.distributed as dist


def broadcast_bytes(said: bytes | None) -> bytes:
    """What rank 0 says, on every rank. The others pass None; all must call it."""
    size = torch.tensor([len(said) if said is not None else 0])
    dist.broadcast(size, src=0)
    text = torch.frombuffer(bytearray(said), dtype=torch.uint8) if said else torch.empty(int(size), dtype=torch.uint8)
    if len(text):
        dist.broadcast(text, src=0)
    return text.numpy().tobytes()


def gather_bytes(said: bytes) -> list[bytes]:
    """What each rank says, in their order, on rank 0; empty on the others. All must call it."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(said)]))
    longest = max(int(size) for size in sizes)
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8) if said else mine[:0]
    is_first = dist.get_rank() == 0
    all_said = [torch.empty(longest, dtype=torch.uint8) for _ in sizes] if is_first else None
    if longest:
        dist.gather(mine, all_said, dst=0)
    if all_said is None:
        return []
    return [text[: int(size)].numpy().tobytes() for text, size in zip(all_said, sizes, strict=True)]
