"""One of two tensor ranks with megatron-core's own GPTModel: saves it as Megatron-LM does, and loads what we wrote."""

import multiprocessing
import sys
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.nn import functional

from async_rl.megatron import (
    experts,  # noqa: F401  # with what Megatron's experts need without a GPU
    host,
    parallel,
)
from async_rl.megatron.compat import GPTModel, TransformerConfig, get_gpt_layer_local_spec
from tests.support.model_families import SIZES

CPU = torch.device("cpu")
NAMES = ("qwen3", "qwen3_moe", "qwen2")
"""Models of tests.support.model_families, of which this builds plain copies."""
SAVED = ("qwen3", "qwen3_moe")
VOCABULARY = 64
"""Padded, as Megatron-LM does it."""
ARGUMENTS: dict[str, Any] = {
    "num_layers": 3, "hidden_size": 32, "ffn_hidden_size": 56, "num_attention_heads": 4, "group_query_attention": True,
    "num_query_groups": 2, "kv_channels": 16, "max_position_embeddings": 64, "position_embedding_type": "rope",
    "rotary_base": 50000, "rotary_percent": 1.0, "use_rope_scaling": False, "normalization": "RMSNorm", "norm_epsilon": 1e-6,
    "qk_layernorm": True, "swiglu": True, "add_bias_linear": False, "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": True, "num_experts": None, "tensor_model_parallel_size": 2,
}  # fmt: skip
"""What Megatron-LM would have saved beside the first model."""
EXPERTS = {
    "num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_router_pre_softmax": False, "moe_layer_freq": 1,
    "moe_shared_expert_intermediate_size": None,
}  # fmt: skip


def tokens() -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (1, 11), generator=torch.Generator().manual_seed(3))


def gpt_model(name: str) -> GPTModel:
    has_experts, is_qwen2 = name == "qwen3_moe", name == "qwen2"
    of_experts: dict[str, Any] = {
        "num_moe_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32", "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
    }  # fmt: skip
    with host.on_host(), host.quiet():
        config = TransformerConfig(
            num_layers=3, hidden_size=32, ffn_hidden_size=56, num_attention_heads=4, num_query_groups=2,
            kv_channels=8 if is_qwen2 else 16, normalization="RMSNorm", layernorm_epsilon=1e-6, gated_linear_unit=True,
            activation_func=functional.silu, add_bias_linear=False, add_qkv_bias=is_qwen2, qk_layernorm=not is_qwen2,
            hidden_dropout=0.0, attention_dropout=0.0, tensor_model_parallel_size=2, use_cpu_initialization=True,
            perform_initialization=False, moe_token_dispatcher_type="alltoall", gradient_accumulation_fusion=False,
            masked_softmax_fusion=False, persist_layer_norm=False, apply_rope_fusion=False, bias_activation_fusion=False,
            bias_dropout_fusion=False, **(of_experts if has_experts else {}),
        )  # fmt: skip
        spec = get_gpt_layer_local_spec(
            num_experts=6 if has_experts else None, normalization="RMSNorm", qk_layernorm=not is_qwen2
        )
        return GPTModel(
            config, spec, vocab_size=VOCABULARY, max_sequence_length=64, position_embedding_type="rope", rotary_base=50000,
            share_embeddings_and_output_weights=False, parallel_output=False,
        ).eval()  # fmt: skip


def randomize(model: GPTModel, rank: int) -> None:
    """Norms and the router are the same on both ranks."""
    for name, parameter in model.named_parameters():
        is_whole = parameter.dim() == 1 or "router" in name
        seed = zlib.crc32(name.encode()) + (0 if is_whole else rank)
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.3
        parameter.data.copy_(values + (1.0 if parameter.dim() == 1 else 0.0))


@torch.no_grad()
def logits(model: GPTModel) -> torch.Tensor:
    ids = tokens()
    length = ids.shape[1]
    after = torch.ones(1, 1, length, length).triu(1).bool()
    with host.on_host():
        return model(ids, torch.arange(length)[None], after)[0, :, : SIZES["vocab_size"]]


def save(model: GPTModel, name: str, folder: Path, rank: int) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.transformer.enums import AttnBackend

    if rank == 0:
        folder.mkdir()
    torch.distributed.barrier()
    multiprocessing.current_process()._config["daemon"] = False  # pyright: ignore  # its writers are children
    manager = multiprocessing.get_context("fork").Manager()
    filesystem_async._results_queue = manager.Queue()  # pyright: ignore  # which it would spawn, in seconds
    arguments = ARGUMENTS | (EXPERTS if name == "qwen3_moe" else {}) | {"attention_backend": AttnBackend.auto}
    state = {
        "model": model.sharded_state_dict(),
        "args": Namespace(**arguments),
        "iteration": 7,
        "checkpoint_version": 3.0,
    }
    with host.quiet(), host.on_host():
        dist_checkpointing.save(state, str(folder), validate_access_integrity=False)
    manager.shutdown()


def load(model: GPTModel, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    with host.quiet():
        described = dist_checkpointing.load_content_metadata(str(folder))
    for layer in model.decoder.layers:  # as those of Transformer Engine, which does not fuse the norm before experts
        if hasattr(layer.mlp, "router"):  # pyright: ignore
            layer.submodules_config.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)  # pyright: ignore
    wanted = {"model": model.sharded_state_dict(metadata=described)}
    with host.quiet(), host.on_host():
        found: Any = dist_checkpointing.load(wanted, str(folder), strict="assume_ok_unexpected")
    model.load_state_dict(found["model"])


def main(folder: Path, rank: int) -> None:
    meeting = parallel.Rendezvous(store=FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    parallel.initialize(device=CPU, tensor=2, expert=2, rendezvous=meeting)
    written: dict[str, torch.Tensor] = {}
    for name in NAMES:
        model = gpt_model(name)
        if name in SAVED:
            randomize(model, rank)
            written[f"saved.{name}"] = logits(model)
            save(model, name, folder / f"saved-{name}", rank)
            randomize(model, rank + 2)
        load(model, folder / f"written-{name}" / "release")
        written[f"loaded.{name}"] = logits(model)
    if rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in written.items()}, folder / "logits.safetensors")
    parallel.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
