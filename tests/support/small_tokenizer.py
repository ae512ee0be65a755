"""A small Hugging Face tokenizer with a chat template, made on the spot: byte-level BPE, so that any text comes back."""

from collections.abc import Sequence
from pathlib import Path

CHATML = r"""
{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls %}{{ '\n' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Like Qwen's: tool results stand together in one turn of the user."""

THINKING = """
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and '</think>' in content and not loop.last %}
{%- set content = content.split('</think>')[-1] | trim %}
{%- endif %}<|im_start|>{{ message.role }}
{{ content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
"""Drops the thoughts of earlier answers: a history rendered again is no prefix of what was sampled."""

HEADERS = """<|begin|>
{%- for message in messages %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}<|head|>{{ role }}<|/head|>

{% if message.tool_calls %}
{%- for call in message.tool_calls %}{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}
{%- endfor %}
{%- elif message.role == 'tool' %}{{ message.content | tojson }}
{%- else %}{{ message.content | trim }}
{%- endif %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|head|>assistant<|/head|>

{% endif %}"""
"""Like Llama 3's: everything is trimmed, and tool results are JSON strings."""

SPECIAL = ["<|im_end|>", "<|im_start|>", "<|begin|>", "<|head|>", "<|/head|>"]


def make_tokenizer(folder: Path, template: str = CHATML, *, words: Sequence[str] = ()) -> Path:
    """`words` become tokens of their own, so that a model with random weights says them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    table = Tokenizer(models.BPE())
    table.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    table.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    table.train_from_iterator(
        ['<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call> user assistant system'] * 4, trainer
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=table, eos_token=SPECIAL[0], additional_special_tokens=SPECIAL[1:])
    tokenizer.add_tokens(list(words))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder
