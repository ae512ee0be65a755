"""The table of Hugging Face's model families, and the features that distinguish them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from async_rl.errors import ConfigError
from async_rl.models.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A `model_type` and its features."""

    name: str
    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    windows: Literal["none", "all layers"] = "none"
    """Layers that `sliding_window` applies to."""

    @property
    def features(self) -> dict[str, Any]:
        """The features that are fields of ModelShape too."""
        return {name: getattr(self, name) for name in FEATURES}

    def includes(self, shape: ModelShape) -> bool:
        return (
            shape.family in (None, self.name)
            and self.features == {name: getattr(shape, name) for name in FEATURES}
            and self.experts == (shape.experts is not None)
            and (self.windows != "none" or shape.window is None)
        )


FEATURES = ("qkv_bias", "qk_norm")

FAMILIES = (
    Family(name="llama", architecture="LlamaForCausalLM"),
    Family(name="mistral", architecture="MistralForCausalLM", windows="all layers"),
    Family(name="qwen2", architecture="Qwen2ForCausalLM", qkv_bias=True),
    Family(name="qwen3", architecture="Qwen3ForCausalLM", qk_norm=True),
    Family(name="qwen3_moe", architecture="Qwen3MoeForCausalLM", qk_norm=True, experts=True),
)


def family_of(shape: ModelShape) -> Family:
    """The family of a model: the named one, or the first with its features. Raises ConfigError if there is none."""
    for family in FAMILIES:
        if family.includes(shape):
            return family
    raise ConfigError("no Hugging Face family has this combination of biases, norms, windows and experts")
