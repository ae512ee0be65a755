"""Tiny random models of all families, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES = {
    "vocab_size": 53, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 5e4,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0,
    "beta_slow": 0.01,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied-llama3": {"model_type": "llama", "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "llama-one-kv-head": {"model_type": "llama", "num_key_value_heads": 1, "head_dim": 24},
    "mistral": {"model_type": "mistral", "head_dim": 16, "sliding_window": 7},
    "mistral-no-window": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 4},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "llama-llama3-of-other-lengths": {
        "model_type": "llama",
        "rope_parameters": {
            **LLAMA3, "low_freq_factor": 0.1, "high_freq_factor": 2.0, "original_max_position_embeddings": 16,
        },
    },
    "qwen2-linear": {"model_type": "qwen2", "rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.5}},
    "qwen3-yarn": {"model_type": "qwen3", "head_dim": 16, "rope_parameters": YARN},
    "qwen3-yarn-not-truncated": {
        "model_type": "qwen3", "head_dim": 16, "rope_parameters": {**YARN, "truncate": False, "attention_factor": 0.8},
    },
    "llama-yarn-of-its-paper": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS},
    "qwen3_moe-mixed": {"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": [1], "tie_word_embeddings": True},
    "qwen3_moe-every-second": {
        "model_type": "qwen3_moe", **EXPERTS, "decoder_sparse_step": 2, "norm_topk_prob": False, "num_experts_per_tok": 1,
    },
    "qwen2_moe": {"model_type": "qwen2_moe", **EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 20},
    "qwen2_moe-mixed": {
        "model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 20, "mlp_only_layers": [1],
        "tie_word_embeddings": True,
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo2-tied": {"model_type": "olmo2", "tie_word_embeddings": True, "num_key_value_heads": 4},
    "gemma3_text": {
        "model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    },
    "gemma3_text-untied": {
        "model_type": "gemma3_text", "head_dim": 8, "tie_word_embeddings": False, "sliding_window_pattern": 2,
        "sliding_window": 5,
    },
}  # fmt: skip
"""Settings by name. The first of each family is also generated from and trained."""


def oracle(name: str) -> PreTrainedModel:
    """A random model whose norms and biases are random too: their defaults would hide a mix-up."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(SIZES | MODELS[name])))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if parameter.dim() == 1 else 0.0))
    return model.eval()


def write_model(name: str, folder: Path) -> PreTrainedModel:
    model = oracle(name)
    model.save_pretrained(folder)
    return model
