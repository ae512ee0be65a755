"""One of two ranks: builds the model split by tensors, then by layers, and writes what rank 0 gathers."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from async_rl.megatron import parallel
from async_rl.megatron.compat import parallel_state
from async_rl.megatron.heads.logprobs import token_logprobs
from async_rl.megatron.model import build_model, forward_packed, pack
from async_rl.megatron.parameters.full_parameters import load_full
from async_rl.models.shape import ModelShape, Window
from tests.support.full_parameters import gather_full

CPU = torch.device("cpu")


OTHER_FEATURES: dict[str, Any] = {
    "qk_norm_over": "projection", "norms": "around", "activation": "gelu_tanh", "scaled_embeddings": True,
    "window": Window(tokens=3, layers=(0, 2, 3), rope_theta=1e3),
}  # fmt: skip


def shape(*, tied: bool) -> ModelShape:
    """The model with tied embeddings has also the rarer features of families."""
    return ModelShape(
        hidden=32, layers=4, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab_size=21, max_positions=64, rope_theta=1e4,
        qkv_bias=True, qk_norm=True, tied_embeddings=tied, init_std=0.2, **(OTHER_FEATURES if tied else {}),
    )  # fmt: skip


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 21, (length,), generator=generator) for length in (1, 7, 4)]


def scored(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of each next token, and the gradient of their sum with respect to the first norm's weight."""
    ids, positions, packing = pack(sequences())
    logprobs = token_logprobs(forward_packed(model, ids, positions, packing), ids.roll(-1), temperature=0.7)
    logprobs.sum().backward()
    norm = dict(model.named_parameters())["decoder.layers.0.input_layernorm.weight"]
    assert norm.grad is not None
    return logprobs.detach(), norm.grad


def main(folder: Path, rank: int) -> None:
    meeting = parallel.Rendezvous(store=FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    written = {}
    for layout in ("tensor", "pipeline"):
        parallel.initialize(device=CPU, rendezvous=meeting, **{layout: 2})
        for tied in (True, False):
            model = build_model(shape(tied=tied), device=CPU, dtype=torch.float32, seed=5)
            label = f"{layout}.{'tied' if tied else 'untied'}"
            initial = gather_full(model, shape(tied=tied))
            if layout == "tensor":
                written[f"{label}.logprobs"], written[f"{label}.gradient"] = scored(model)
            elsewhere = build_model(shape(tied=tied), device=CPU, dtype=torch.float32, seed=6)
            received = [initial]
            dist.broadcast_object_list(received, src=0)
            assert received[0] is not None
            load_full(elsewhere, shape(tied=tied), received[0])
            loaded = gather_full(elsewhere, shape(tied=tied))
            if initial is not None and loaded is not None:
                assert rank == 0
                written |= {f"{label}.initial.{name}": tensor for name, tensor in initial.items()}
                written |= {f"{label}.loaded.{name}": tensor for name, tensor in loaded.items()}
            else:
                assert (rank, initial, loaded) == (1, None, None)
        parallel_state.destroy_model_parallel()
    if rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in written.items()}, folder / "gathered.safetensors")
    parallel.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
