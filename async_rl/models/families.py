"""The table of Hugging Face's model families, and the features that distinguish them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from async_rl.errors import ConfigError
from async_rl.models.shape import ModelShape, Norms


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A `model_type` and its features."""

    name: str
    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_over: Literal["head", "projection"] = "head"
    norms: Norms = "before"
    centered_norms: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    scaled_embeddings: bool = False
    experts: Literal["none", "routed", "shared too"] = "none"
    windows: Literal["none", "all layers", "by layer"] = "none"
    """Layers that `sliding_window` applies to."""
    tied_embeddings: bool = False
    """The value of `tie_word_embeddings` if it is missing."""

    @property
    def features(self) -> dict[str, Any]:
        """The features that are fields of ModelShape too."""
        return {name: getattr(self, name) for name in FEATURES}

    def includes(self, shape: ModelShape) -> bool:
        return (
            shape.family in (None, self.name)
            and self.features == {name: getattr(shape, name) for name in FEATURES}
            and self.experts == _experts_of(shape)
            and (self.windows != "none" or shape.window is None)
            and (self.windows == "by layer" or shape.query_scalar is None)
        )


FEATURES = ("qkv_bias", "qk_norm", "qk_norm_over", "norms", "centered_norms", "activation", "scaled_embeddings")


def _experts_of(shape: ModelShape) -> Literal["none", "routed", "shared too"]:
    if shape.experts is None:
        return "none"
    return "routed" if shape.experts.shared_ffn is None else "shared too"


FAMILIES = (
    Family(name="llama", architecture="LlamaForCausalLM"),
    Family(name="mistral", architecture="MistralForCausalLM", windows="all layers"),
    Family(name="qwen2", architecture="Qwen2ForCausalLM", qkv_bias=True),
    Family(name="qwen3", architecture="Qwen3ForCausalLM", qk_norm=True),
    Family(name="qwen3_moe", architecture="Qwen3MoeForCausalLM", qk_norm=True, experts="routed"),
    Family(name="qwen2_moe", architecture="Qwen2MoeForCausalLM", qkv_bias=True, experts="shared too"),
    Family(name="olmo2", architecture="Olmo2ForCausalLM", qk_norm=True, qk_norm_over="projection", norms="after"),
    Family(
        name="gemma3_text",
        architecture="Gemma3ForCausalLM",
        qk_norm=True,
        norms="around",
        centered_norms=True,
        activation="gelu_tanh",
        scaled_embeddings=True,
        windows="by layer",
        tied_embeddings=True,
    ),
)


def family_of(shape: ModelShape) -> Family:
    """The family of a model: the named one, or the first with its features. Raises ConfigError if there is none."""
    for family in FAMILIES:
        if family.includes(shape):
            return family
    raise ConfigError("no Hugging Face family has this combination of biases, norms, windows and experts")


_LATENT = (
    "its keys and values are compressed (multi-latent attention), which Megatron-core's engine decodes with FlashMLA alone"
)

NOT_CARRIED = {
    "gemma3": "a model of text and images; its text model alone is of type gemma3_text",
    "gemma2": "tanh caps its attention scores and logits, which the attention kernels of learner and engine do not compute",
    "gpt_oss": "it has learned attention sinks, which Megatron-core computes only with Transformer Engine or FlashAttention",
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
}
"""Why families that are often asked for are refused."""
