"""Writes the character tokenizer as Hugging Face files, so that an exported model can be used elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_rl.tokenization.tokenizers import Characters

PAD, BOS, END = "<pad>", "<bos>", "<eos>"
_CHAT = (
    "{{ bos_token }}"
    "{% for tool in tools or [] %}tool {{ tool.function.name }}: {{ tool.function.parameters | tojson }}{{ '\\n' }}{% endfor %}"
    "{% for message in messages %}{{ message.role + ': ' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>"
    "{% endfor %}{{ '\\n' }}{% endfor %}"
)
"""Chat template equivalent to `Characters.render`."""


def write_character_files(folder: Path, alphabet: str) -> None:
    """Write tokenizer.json and tokenizer_config.json. They encode as `Characters` does, except text that spells a special
    token.
    """
    words = [PAD, BOS, END, Characters.unknown_text, *alphabet]
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [_special(word, number) for number, word in enumerate(words[: Characters.unknown_id])],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {BOS: {"id": BOS, "ids": [Characters.bos_id], "tokens": [BOS]}},
        },
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(words)},
            # Not a special token, because decoding omits those, and <unk> must keep its position.
            "unk_token": Characters.unknown_text,
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=2, ensure_ascii=False) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _special(word: str, number: int) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": word, **plain, "special": True}
