"""Adapters compute with the merged matrix, and have the gradients that follow from its gradient."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from async_rl.config.learner import LORA_TARGETS, LoraConfig
from async_rl.errors import ConfigError
from async_rl.megatron import parallel
from async_rl.megatron.huggingface.tensors import from_canonical
from async_rl.megatron.lora import attach, base_alone
from async_rl.megatron.model import build_model, forward_packed, pack
from async_rl.megatron.parameters.adapters import adapters, check_lora, trained_rows
from async_rl.megatron.parameters.full_parameters import held_boxes, load_full, local_parameters
from async_rl.models.shape import Experts, ModelShape

CPU = torch.device("cpu")
SHAPE = ModelShape(
    hidden=32, layers=2, heads=4, kv_heads=2, head_dim=12, ffn=40, vocab_size=19, max_positions=64, rope_theta=1e4,
    qkv_bias=True, init_std=0.3,
)  # fmt: skip


def logits(model: nn.Module) -> Tensor:
    return forward_packed(model, *pack([torch.arange(length) % 19 for length in (3, 17)])).logits()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    logits(model).log_softmax(-1)[:, 5].sum().backward()
    return {name: own.grad for name, own in local_parameters(model).items() if own.grad is not None}


@pytest.mark.parametrize("targets", [LORA_TARGETS, ("k_proj", "up_proj")], ids=["all", "some"])
def test_logits_and_gradients_are_those_of_the_merged_matrices(targets: tuple[str, ...]) -> None:
    parallel.initialize(device=CPU)
    lora = LoraConfig.model_validate({"rank": 3, "alpha": 6, "targets": targets})
    model = build_model(SHAPE, device=CPU, dtype=torch.float32, seed=1)
    before = logits(model)
    adapted = attach([model], SHAPE, lora, seed=1)
    assert torch.equal(logits(model), before), "adapters begin with B = 0"

    own, random = local_parameters(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for row in trained_rows(SHAPE, lora):
            own[row.name].copy_(torch.randn(row.shape, generator=random) * 0.2)
    for each in adapted.values():
        each.refresh()
    merged = {
        box.name: part.clone()
        for box, part in held_boxes(model, SHAPE, {name: each.merged for name, each in adapted.items()}).items()
    }
    plain = build_model(SHAPE, device=CPU, dtype=torch.float32, seed=2)
    load_full(plain, SHAPE, merged)
    assert torch.equal(logits(model), logits(plain))
    assert not torch.equal(logits(model), before)
    with base_alone(adapted.values()):
        assert torch.equal(logits(model), before)

    found, whole = gradients(model), from_canonical(gradients(plain), SHAPE)
    assert found.keys() == {row.name for row in trained_rows(SHAPE, lora)}
    base = from_canonical({box.name: part for box, part in held_boxes(model, SHAPE).items()}, SHAPE)
    theirs = from_canonical(merged, SHAPE)
    for each in adapters(SHAPE, lora):
        a, b, of_matrix = own[each.a.name], own[each.b.name], whole[f"{each.theirs}.weight"]
        torch.testing.assert_close(theirs[f"{each.theirs}.weight"], base[f"{each.theirs}.weight"] + 2 * b @ a)
        torch.testing.assert_close(found[each.a.name], 2 * b.T @ of_matrix, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found[each.b.name], 2 * of_matrix @ a.T, atol=1e-4, rtol=1e-4)
    untouched = {name for name in theirs if torch.equal(theirs[name], base[name])}
    assert untouched == theirs.keys() - {f"{each.theirs}.weight" for each in adapters(SHAPE, lora)}


def test_what_cannot_have_adapters_is_refused() -> None:
    sparse = replace(SHAPE, experts=Experts(number=4, per_token=2, ffn=8, layers=(1,)))
    with pytest.raises(ConfigError, match=r"learner\.lora\.targets: routed experts .* \[q_proj, k_proj, v_proj, o_proj\]"):
        check_lora(LoraConfig(), sparse, "local")
    check_lora(LoraConfig(targets=("q_proj", "o_proj")), sparse, "local")
    with pytest.raises(ConfigError, match=r"learner\.lora: .* model\.layer_spec to local"):
        check_lora(LoraConfig(), SHAPE, "transformer_engine")
