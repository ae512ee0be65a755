"""Write a small model of the same family as a Hugging Face folder, with random weights. `async-rl rehearse` trains it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError, boundary
from async_rl.launch.package_guard import guard
from async_rl.models.hf_config import read_config

HIDDEN, HEAD_DIM, FFN, LAYERS, EXPERTS = 64, 16, 128, 4, 4


def shrunk(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a small model with the same vocabulary, positions, grouping of heads and kinds of layers."""
    heads = found["num_attention_heads"]
    shared = min(2, heads // found.get("num_key_value_heads", heads))
    small: dict[str, Any] = {
        "hidden_size": HIDDEN, "head_dim": HEAD_DIM, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2 * shared, "num_key_value_heads": 2, "moe_intermediate_size": FFN // 4,
        "shared_expert_intermediate_size": FFN // 4, "num_experts": EXPERTS, "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2, "query_pre_attn_scalar": HEAD_DIM,
    }  # fmt: skip
    kept = {key: value for key, value in small.items() if key in found or key in ("head_dim", "num_key_value_heads")}
    if layers := found.get("layer_types"):
        kinds = list(dict.fromkeys(layers))
        kept["layer_types"] = [kinds[layer % len(kinds)] for layer in range(LAYERS)]
    return {**found, **kept, "mlp_only_layers": [], "dtype": "float32", "torch_dtype": "float32"}


def write_small(source: Path, to: Path) -> None:
    """Write the model, with a tokenizer of bytes for where its own is missing."""
    from transformers.models.auto.configuration_auto import AutoConfig
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    try:
        to.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{to} cannot be made: {error.strerror}; choose another run.folder") from error
    config = shrunk(read_config(source))
    (to / "config.json").write_text(json.dumps(config))
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(to))
    model.save_pretrained(to)
    (to / "config.json").write_text(json.dumps(config))  # as the family writes it, not as this transformers does
    _write_bytes_tokenizer(to)


def _write_bytes_tokenizer(to: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = {token: number for number, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    inner = Tokenizer(models.BPE(vocab=words, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = _CHAT_ML
    tokenizer.save_pretrained(to)


_CHAT_ML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


if __name__ == "__main__":
    with boundary("async-rl rehearse"):
        guard()
        write_small(Path(sys.argv[1]), Path(sys.argv[2]))
