"""A Hugging Face folder with random weights and a tokenizer of digits, made in a moment."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

DIGITS = "0123456789="
END = "<eos>"


def write_folder(folder: Path, *, seed: int = 0, vocabulary: int | None = None) -> Path:
    """Qwen3 in small. Its answers are arbitrary, and differ between prompts. The vocabulary may exceed the tokenizer's."""
    words = {token: number for number, token in enumerate([END, "<bos>", *DIGITS])}
    inner = Tokenizer(models.WordLevel(words, unk_token="0"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, bos_token="<bos>").save_pretrained(folder)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary if vocabulary is not None else len(words), hidden_size=32, intermediate_size=48,
            num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False,
            bos_token_id=1, eos_token_id=0,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4 + (1.0 if parameter.dim() == 1 else 0.0))
    model.save_pretrained(folder)
    return folder
