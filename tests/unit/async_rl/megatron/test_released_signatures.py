"""What this repository calls in torch, Megatron and Transformer Engine on a GPU is what every supported release has.

The releases are a table, made from their sources by `make signatures`: nothing is fetched here, and no GPU is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.megatron.attention.scores import Scores
from async_rl.megatron.attention.varlen import varlen_attention
from async_rl.megatron.compat import attention_module
from async_rl.megatron.model import packed_params
from tests.support.signatures.calls import Call, calls_in, imports_of, inherited_constructions, product_calls
from tests.support.signatures.reading import Signatures
from tests.support.signatures.releases import DISTRIBUTIONS, RELEASES, TRANSFORMER_ENGINE_BESIDE
from tests.support.signatures.table import megatron_calls, parsed, released, shortened, takes

VARLEN = "torch.nn.attention.varlen.varlen_attn"
INFERENCE = "megatron.core.inference"
OLD, NEW = {"0.16.1"}, {"0.17.1", "0.18.2", "0.19.2"}
WRAPPER = f"{INFERENCE}.model_inference_wrappers"
NOT_CALLED = {
    (f"{WRAPPER}.inference_wrapper_config.InferenceWrapperConfig", 0): NEW,
    (f"{WRAPPER}.gpt.gpt_inference_wrapper.GPTInferenceWrapper", 3): NEW,
    (f"{INFERENCE}.config.InferenceConfig", 0): OLD,
    (f"{INFERENCE}.contexts.dynamic_block_allocator.BlockAllocator", 3): NEW,
}
"""Calls, by the number of arguments in their places, that async_rl/megatron/engine makes in some releases of Megatron only."""
NOT_REACHED = {
    "transformer_engine.common.recipe.DelayedScaling": "fp8 scales by the current values here, without a history",
    "transformer_engine.pytorch.cpp_extensions.general_gemm": "Megatron does without where the import beside it fails",
    "transformer_engine.pytorch.module.base.get_workspace": "the import that fails",
}
"""What Megatron calls in its door to Transformer Engine, and the one beside it has not, with why that does no harm."""


def test_every_release_takes_the_calls() -> None:
    refused = [
        f"{call}: {version} has {signatures}"
        for call in product_calls()
        for version, signatures in released(call.name).items()
        if not takes(signatures, call) and version not in NOT_CALLED.get((call.name, call.positional), ())
    ]
    assert not refused, "not in the releases, or not in the table yet (make signatures):\n" + "\n".join(refused)


def test_the_installed_releases_take_the_calls() -> None:
    roots = [Path(torch.__file__).parents[1], Path(attention_module.__file__).parents[3]]

    def read(path: str) -> str | None:
        return next((file.read_text() for root in roots if (file := root / path).is_file()), None)

    installed = Signatures(read)
    refused = [
        str(call)
        for call in product_calls()
        if not takes(installed.of(call.name), call) and (call.name, call.positional) not in NOT_CALLED
    ]
    assert not refused


@pytest.mark.parametrize("megatron", TRANSFORMER_ENGINE_BESIDE)
def test_transformer_engine_takes_what_megatron_calls(megatron: str) -> None:
    beside = TRANSFORMER_ENGINE_BESIDE[megatron]
    refused = {call.name: str(call) for call in megatron_calls(megatron) if not takes(released(call.name)[beside], call)}
    assert refused.keys() <= NOT_REACHED.keys(), refused


@pytest.mark.parametrize("kv_heads", [4, 2], ids=["as many key heads", "fewer key heads"])
@pytest.mark.parametrize("scores", [Scores(), Scores(scale=0.5), Scores(window=3)], ids=["plain", "scale", "window"])
@pytest.mark.parametrize("release", RELEASES["torch"])
def test_variable_length_attention_is_called_as_each_torch_has_it(
    monkeypatch: pytest.MonkeyPatch, release: str, scores: Scores, kv_heads: int
) -> None:
    (signature,) = released(VARLEN)[release]
    arguments: list[dict[str, Any]] = []
    names = [each.arg for each in [*parsed(signature).args, *parsed(signature).kwonlyargs]]

    def kernel(*given: Any) -> torch.Tensor:
        arguments.append(dict(zip(names, given, strict=True)))
        return given[0]

    as_released = eval(f"lambda {signature}: kernel({', '.join(names)})", {"kernel": kernel})
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", as_released)
    query, key = torch.randn(8, 4, 32), torch.randn(8, kv_heads, 32)

    out = varlen_attention(query, key, key, packed_params(torch.tensor([0, 3, 8]), 5), scores)

    given = arguments[-1]
    assert out.shape == query.shape
    assert given["window_size"] == scores.window_size
    assert given["scale"] == (scores.scale if scores.scale is not None else ...)
    assert [given["max_q"], given["max_k"]] == [5, 5]
    assert given["key"].shape[1] == (kv_heads if given.get("enable_gqa") is True else 4)


SOURCES = {
    "box/__init__.py": "from .inside import *\nfrom box.inside import make as build\n",
    "box/inside.py": "class Base:\n    def __init__(self, size, *, lid=True): ...\nclass Box(Base): ...\n"
    "@dataclass\nclass Card:\n    name: str\n    color: str = 'red'\n"
    "def make(size: int, depth: int = 3, *, lid: bool = False) -> Box: ...\n",
}
CALLER = """
import box
from box import build as made
class Chest(box.Box):
    def __init__(self):
        super().__init__(3, lid=False)
made(1, lid=True); made(1, top=2); box.Card(name="x"); box.Card(color="x"); made(*sizes)
"""


def test_signatures_and_calls_are_read_from_sources() -> None:
    known = Signatures(SOURCES.get)
    imported = imports_of(CALLER)
    calls = [*calls_in(CALLER, "caller", imported), *inherited_constructions(CALLER, "caller", imported)]

    def fits(name: str) -> list[bool]:
        return [takes(known.of(call.name), call) for call in calls if call.name == name]

    assert known.of("box.build") == ["size, depth=..., *, lid=..."]
    assert known.of("box.Card") == ["*, name, color=..."]
    assert fits("box.build") == [True, False, True]
    assert fits("box.Card") == [True, False]
    assert fits("box.Box") == [True]
    assert known.of("box.nothing") == []


def test_parameters_that_no_call_uses_are_left_out_of_the_table() -> None:
    calls = [Call("box.build", 1, ("lid",), "caller:1"), Call("box.build", 0, ("size", "color"), "caller:2")]

    assert shortened("size, depth=..., color=..., *, lid=..., top=..., key", calls) == "size, *, color=..., lid=..., key"


def test_the_table_names_what_the_packages_are() -> None:
    assert {DISTRIBUTIONS[call.name.partition(".")[0]] for call in product_calls()} == {"torch", "megatron-core"}
