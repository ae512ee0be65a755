"""A config.json of Hugging Face: what it says in old and new transformers, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import ModelConfig
from async_rl.errors import ConfigError
from async_rl.models.from_config import model_shape
from async_rl.models.hf_config import read_dtype, refusals, written_config
from async_rl.models.rope import RopeScaling
from async_rl.models.shape import ModelShape

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 53,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
LLAMA: dict[str, Any] = {"model_type": "llama", **SIZES}
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", **SIZES, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def shape_of(folder: Path, **content: Any) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(content))
    return model_shape(ModelConfig(folder=folder), vocab_size=1)


def test_rope_is_read_where_either_version_of_transformers_writes_it(tmp_path: Path) -> None:
    assert shape_of(tmp_path, **LLAMA).rope_theta == 10_000
    assert shape_of(tmp_path, **LLAMA, rope_theta=5e5, rope_scaling=None).rope_theta == 5e5
    new = shape_of(tmp_path, **LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert (new.rope_theta, new.rope_scaling) == (5e5, None)
    scaled = shape_of(tmp_path, **LLAMA, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3})
    assert (scaled.rope_theta, scaled.rope_scaling) == (5e5, RopeScaling(kind="llama3", factor=32, original_positions=8192))
    assert scaled == shape_of(tmp_path, **LLAMA, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})


def test_which_layers_have_experts(tmp_path: Path) -> None:
    def layers(**changed: Any) -> tuple[int, ...]:
        experts = shape_of(tmp_path, **(MOE | changed)).experts
        assert experts is not None
        return experts.layers

    assert layers() == (0, 1, 2, 3)
    assert layers(mlp_only_layers=[0, 2]) == (1, 3)
    assert layers(decoder_sparse_step=2) == (1, 3)
    assert layers(decoder_sparse_step=2, mlp_only_layers=[1]) == (3,)


def test_experts_are_counted_under_both_of_their_names(tmp_path: Path) -> None:
    renamed = {("num_local_experts" if key == "num_experts" else key): value for key, value in MOE.items()}
    assert shape_of(tmp_path, **MOE) == shape_of(tmp_path, **renamed)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**LLAMA, "model_type": "gpt_oss"}, "attention sinks"),
    ({**LLAMA, "model_type": "deepseek_v3"}, "multi-latent attention"),
    (
        {**LLAMA, "model_type": "gemma3_text", "final_logit_softcapping": 30.0},
        "final_logit_softcapping, which is not supported",
    ),
    ({**LLAMA, "model_type": "gemma3_text", "hidden_activation": "silu"}, "hidden_activation 'silu'"),
    ({**LLAMA, "model_type": "olmo2", "sliding_window": 8}, "a sliding window"),
    ({**MOE, "model_type": "qwen2_moe", "qkv_bias": False}, "no biases on query, key and value"),
    ({**LLAMA, "model_type": "mamba"}, "model_type 'mamba'; supported are llama, mistral, qwen2"),
    (
        {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "'dynamic', where only 'default', 'linear', 'llama3', 'yarn'",
    ),
    ({**LLAMA, "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'longrope'"),
    ({**LLAMA, "rope_scaling": {"type": "linear"}}, "lacks factor"),
    ({**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per kind of layer"),
    ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({**LLAMA, "model_type": "qwen2", "use_sliding_window": True}, "a sliding window"),
    ({**LLAMA, "model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ({**LLAMA, "attention_bias": True, "mlp_bias": True}, "attention_bias and mlp_bias"),
    ({**LLAMA, "hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({**LLAMA, "quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ({**MOE, "norm_topk_prob": True, "num_experts_per_tok": 1}, "one expert per token"),
    ({key: value for key, value in LLAMA.items() if key != "hidden_size"}, "lacks hidden_size"),
    ({**LLAMA, "num_attention_heads": 0, "head_dim": None}, "an invalid value"),
    ({**LLAMA, "rope_theta": None}, "an invalid value"),
]


@pytest.mark.parametrize(("content", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, content: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shape_of(tmp_path, **content)


def test_everything_that_is_refused_is_said_at_once() -> None:
    assert len(list(refusals({**LLAMA, "hidden_act": "gelu", "mlp_bias": True}))) == 2


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.folder: cannot read"):
        model_shape(ModelConfig(folder=tmp_path), vocab_size=1)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        model_shape(ModelConfig(folder=tmp_path), vocab_size=1)


def test_a_model_knows_all_tokens_of_the_tokenizer(tmp_path: Path) -> None:
    known = shape_of(tmp_path, **LLAMA).vocab_size
    assert model_shape(ModelConfig(folder=tmp_path), vocab_size=known).vocab_size == known
    with pytest.raises(ConfigError, match=f"has {known} tokens and the tokenizer {known + 1}"):
        model_shape(ModelConfig(folder=tmp_path), vocab_size=known + 1)


def test_sequences_are_as_long_as_the_run_says_and_at_most_as_the_model_has_positions(tmp_path: Path) -> None:
    shape_of(tmp_path, **LLAMA)

    def limited(most: int | None) -> ModelShape:
        return model_shape(ModelConfig(folder=tmp_path, max_sequence=most), vocab_size=1)

    assert [limited(most).context_tokens for most in (None, 1, 64)] == [64, 1, 64]
    assert written_config(limited(8), dtype="float32")["max_position_embeddings"] == 64
    with pytest.raises(ConfigError, match=r"model\.max_sequence \(65\) is above the model's 64 positions"):
        limited(65)


def test_a_folder_need_not_say_what_its_weights_are(tmp_path: Path) -> None:
    said: list[dict[str, str | None]] = [{}, {"dtype": None}, {"torch_dtype": "bfloat16"}, {"dtype": "float16"}]
    found: list[str] = []
    for content in said:
        (tmp_path / "config.json").write_text(json.dumps(content))
        found.append(read_dtype(tmp_path))
    assert found == ["float32", "float32", "bfloat16", "float16"]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 2.0},
        {"type": "linear", "factor": 2},
        {"type": "yarn", "factor": 4},
        {"type": "yarn", "factor": None, "original_max_position_embeddings": 16, "beta_fast": 8, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3},
    ],
    ids=lambda rope: f"{rope.get('type', rope.get('rope_type'))}-{len(rope)}",
)
@pytest.mark.parametrize("content", [LLAMA, MOE | {"mlp_only_layers": [0]}], ids=["llama", "qwen3_moe"])
def test_what_is_written_is_read_as_the_same_shape(tmp_path: Path, content: dict[str, Any], rope: dict[str, Any]) -> None:
    shape = shape_of(tmp_path, **content, rope_scaling=rope)
    assert shape.rope_scaling is not None
    assert shape_of(tmp_path, **written_config(shape, dtype="bfloat16")) == shape


def test_a_made_up_model_may_have_experts() -> None:
    size = {"hidden": 32, "layers": 4, "heads": 4, "experts": {"number": 8, "ffn": 16, "every": 2}}
    shape = model_shape(ModelConfig.model_validate({"size": size}), vocab_size=20)
    assert shape.experts is not None
    assert (shape.experts.layers, shape.experts.per_token, shape.qk_norm) == ((1, 3), 2, True)
    assert written_config(shape, dtype="float32")["model_type"] == "qwen3_moe"
