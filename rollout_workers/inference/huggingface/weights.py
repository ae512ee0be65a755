"""transformers' model of a shape, and its weights from full parameters under canonical names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from async_rl.errors import ConfigError
from async_rl.megatron.huggingface.tensors import huggingface_tensors, sizes_of
from async_rl.megatron.parameters.full_parameters import check_complete, difference_of
from async_rl.models.hf_config import written_config
from async_rl.models.shape import ModelShape


def empty_model(shape: ModelShape, *, device: torch.device, dtype: torch.dtype) -> Any:
    """Make transformers' model with arbitrary weights."""
    from transformers.models.auto.configuration_auto import AutoConfig  # imported late: it takes seconds
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    config = AutoConfig.for_model(**written_config(shape, dtype=str(dtype).removeprefix("torch.")))
    with device:
        return loader.from_config(config, dtype=dtype).eval()


class HuggingFaceWeights:
    """The parameters of a model under the names of its folder's tensors."""

    def __init__(self, model: nn.Module, shape: ModelShape) -> None:
        self._shape = shape
        self._places = {name: place for each, parameter in model.named_parameters() for name, place in _places(each, parameter)}
        found = {name: tuple(place.shape) for name, place in self._places.items()}
        if difference := difference_of(sizes_of(shape), found):
            raise ConfigError(
                f"worker.backend: transformers' {type(model).__name__} has other tensors than the family's folders "
                f"({difference}); use backend megatron"
            )

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy full parameters into the model. Raises ValueError, and changes nothing, when they are not the model's."""
        check_complete(self._shape, tensors)
        with torch.no_grad():
            for name, tensor in huggingface_tensors(tensors, self._shape):
                self._places[name].copy_(tensor)


def _places(name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder that a parameter consists of. transformers stacks the matrices of all experts of a layer."""
    weight = parameter.detach()
    if name.endswith(".experts.gate_up_proj"):
        for expert, both in enumerate(weight):
            for part, place in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                yield f"{name.removesuffix('gate_up_proj')}{expert}.{part}.weight", place
    elif name.endswith(".experts.down_proj"):
        for expert, place in enumerate(weight):
            yield f"{name.removesuffix('down_proj')}{expert}.down_proj.weight", place
    else:
        yield name, weight
