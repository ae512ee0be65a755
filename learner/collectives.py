"""Collectives of flags and bytes on CPU tensors. Nothing is unpickled."""

from __future__ import annotations

import torch
import torch.distributed as dist


def true_on_all(flag: bool) -> bool:
    """Whether `flag` is true on every rank. Collective."""
    lowest = torch.tensor([int(flag)])
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    return bool(lowest.item())


def broadcast_bytes(payload: bytes | None) -> bytes:
    """Return rank 0's bytes on every rank. Collective; ranks above 0 pass None."""
    size = torch.tensor([len(payload) if payload is not None else 0])
    dist.broadcast(size, src=0)
    text = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(int(size), dtype=torch.uint8)
    if len(text):
        dist.broadcast(text, src=0)
    return text.numpy().tobytes()


def gather_bytes(payload: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return the bytes of all ranks in rank order, on every rank. Collective over `group`, by default the world's."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(payload)]), group=group)
    longest = max(int(size) for size in sizes)
    own = torch.frombuffer(bytearray(payload.ljust(longest, b"\0")), dtype=torch.uint8)
    gathered = [torch.empty_like(own) for _ in sizes]
    dist.all_gather(gathered, own, group=group)
    return [text[: int(size)].numpy().tobytes() for text, size in zip(gathered, sizes, strict=True)]
