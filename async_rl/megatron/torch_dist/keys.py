"""The place of each parameter in a Megatron-LM checkpoint of format torch_dist. No torch.

If all layers are alike, they are stacked: one tensor with a leading dimension for all of them. So are the experts of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.megatron.parameters.table import FUSED_NORMS, Parameter
from async_rl.models.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    key: str
    index: tuple[int, ...] = ()
    """Position in the leading dimensions ..."""
    of: tuple[int, ...] = ()
    """... and the sizes of these."""


def places(row: Parameter, shape: ModelShape) -> list[Place]:
    """Where a checkpoint may have a parameter: first where Megatron-LM with Transformer Engine has it, then where else.

    Others come from its local layers, and from layers that are alike but were listed one by one (--moe-layer-freq).
    """
    if row.layer is None:
        return [Place(key=row.name)]
    name, index, of = row.name.removeprefix(f"decoder.layers.{row.layer}."), (), ()
    if row.expert is not None and shape.experts is not None:
        name = name.replace(f"mlp.experts.{row.expert}.", "mlp.experts.experts.")
        index, of = (row.expert,), (shape.experts.number,)
    names = [*(fused for fused, norm in FUSED_NORMS.items() if norm == name), name]
    if name == "pre_mlp_layernorm.weight" and has_experts(row.layer, shape):
        names.reverse()  # no linear layer follows that it could be fused into
    stacked = [Place(key=f"decoder.layers.{name}", index=(row.layer, *index), of=(shape.layers, *of)) for name in names]
    single = [Place(key=f"decoder.layers.{row.layer}.{name}", index=index, of=of) for name in names]
    return stacked + single if are_alike(shape) else single


def has_experts(layer: int, shape: ModelShape) -> bool:
    return shape.experts is not None and layer in shape.experts.layers


def are_alike(shape: ModelShape) -> bool:
    """Whether all layers have experts, or none has."""
    return shape.experts is None or len(shape.experts.layers) == shape.layers


_WITH_STATE = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight", "layernorm.weight")


def extra_states(row: Parameter, shape: ModelShape) -> list[str]:
    """Keys of the extra states of the modules that begin with a parameter. They are empty, but Megatron-LM asks for them."""
    place = places(row, shape)[0]
    module, shard = place.key.removesuffix(".weight"), _shard(place)
    if module == place.key or not place.key.endswith(_WITH_STATE):
        return []
    found = [f"{module}._extra_state/{shard}"]
    if module.endswith("linear_qkv"):
        found.append(f"{module.removesuffix('linear_qkv')}core_attention._extra_state/{shard}")
    return found


def _shard(place: Place) -> str:
    index, of = (place.index, place.of) if place.index else ((0,), (1,))
    return f"shard_{'.'.join(map(str, index))}_{'.'.join(map(str, of))}"
