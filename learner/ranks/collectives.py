"""Broadcast and gather of bytes over the world's group with CPU tensors. Nothing is unpickled."""

from __future__ import annotations

import torch
import torch.distributed as dist


def broadcast_bytes(payload: bytes | None) -> bytes:
    """Return rank 0's bytes on every rank. Collective; ranks above 0 pass None."""
    size = torch.tensor([len(payload) if payload is not None else 0])
    dist.broadcast(size, src=0)
    text = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(int(size), dtype=torch.uint8)
    if len(text):
        dist.broadcast(text, src=0)
    return text.numpy().tobytes()


def gather_bytes(payload: bytes) -> list[bytes]:
    """Return the bytes of all ranks in rank order on rank 0, an empty list elsewhere. Collective."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(payload)]))
    longest = max(int(size) for size in sizes)
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else mine[:0]
    is_first = dist.get_rank() == 0
    gathered = [torch.empty(longest, dtype=torch.uint8) for _ in sizes] if is_first else None
    if longest:
        dist.gather(mine, gathered, dst=0)
    if gathered is None:
        return []
    return [text[: int(size)].numpy().tobytes() for text, size in zip(gathered, sizes, strict=True)]
