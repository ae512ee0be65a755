"""One of two ranks: a model whose experts, or whose other matrices, are divided between them. Rank 0 writes what it gathers."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from async_rl.megatron import parallel
from async_rl.megatron.compat import parallel_state
from async_rl.megatron.model import build_model, forward_packed, pack
from async_rl.megatron.parameters.full_parameters import load_full, local_parameters
from async_rl.models.shape import Experts, ModelShape
from tests.support.full_parameters import gather_full

CPU = torch.device("cpu")
SHAPE = ModelShape(
    hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab_size=21, max_positions=64, rope_theta=1e4,
    qk_norm=True, init_std=0.3, experts=Experts(number=4, per_token=2, ffn=24, layers=(1,)),
)  # fmt: skip
EXPERTS = tuple(f"decoder.layers.1.mlp.experts.{number}.linear_fc1.weight" for number in range(4))
"""Their gradients are compared: an expert learns from the tokens of every rank."""


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, SHAPE.vocab_size, (length,), generator=generator) for length in (9, 5)]


def main(folder: Path, rank: int) -> None:
    meeting = parallel.Rendezvous(store=FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    written: dict[str, torch.Tensor] = {}
    for layout in ("expert", "tensor", "pipeline"):
        parallel.initialize(device=CPU, rendezvous=meeting, **{layout: 2})
        model = build_model(SHAPE, device=CPU, dtype=torch.float32, seed=5)
        written |= _under(f"{layout}.initial", gather_full(model, SHAPE))
        elsewhere = build_model(SHAPE, device=CPU, dtype=torch.float32, seed=6)
        received = [gather_full(model, SHAPE)]
        dist.broadcast_object_list(received, src=0)
        assert received[0] is not None
        load_full(elsewhere, SHAPE, received[0])
        written |= _under(f"{layout}.loaded", gather_full(elsewhere, SHAPE))
        if layout == "expert":
            written |= _learned(model, rank)
        if layout == "tensor":
            model.eval()  # Megatron trains experts beside tensor ranks only when these divide the tokens too
            with torch.no_grad():
                logits = forward_packed(model, *pack(sequences())).logits()
            parts = [torch.empty_like(logits) for _ in range(2)]
            dist.all_gather(parts, logits.contiguous(), group=parallel.tensor_group())
            written["tensor.logits"] = torch.cat(parts, dim=1)[:, : SHAPE.vocab_size]
        parallel_state.destroy_model_parallel()
    if rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in written.items()}, folder / "gathered.safetensors")
    parallel.shutdown()


def _learned(model: torch.nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """Each rank has a sequence of its own, and half of the experts."""
    logits = forward_packed(model, *pack([sequences()[rank]])).logits()
    logits.logsumexp(dim=-1).sum().backward()
    found: list[object] = [None, None]
    gradients = {name: parameter.grad for name, parameter in local_parameters(model).items() if name in EXPERTS}
    assert len(gradients) == 2
    dist.all_gather_object(found, (logits.detach(), gradients))
    (first, some), (second, others) = found  # pyright: ignore[reportGeneralTypeIssues]
    return {"expert.logits": torch.cat([first, second]), **_under("expert.gradient", {**some, **others})}


def _under(prefix: str, tensors: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()} if tensors is not None else {}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
