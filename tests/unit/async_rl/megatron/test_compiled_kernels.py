"""The Triton kernels compile for A100 and H100 with the sizes of real models: registers and shared memory suffice."""

import pytest
import torch

from async_rl.megatron.attention.head_kernels import HeadNorms, query_key_value
from async_rl.megatron.attention.paged_kernels import number_of_splits, paged_attention
from async_rl.megatron.attention.rotary import Rotation
from async_rl.megatron.heads.logit_kernels import row_scores, slopes
from async_rl.megatron.layers.norm_kernels import RmsNorm, add_and_norm
from async_rl.megatron.layers.swiglu_kernels import Swiglu
from tests.support.compiled_kernels import compiling_for

MODELS = {
    "Qwen3": {"heads": 16, "kv_heads": 8, "dim": 128},
    "Qwen2.5": {"heads": 14, "kv_heads": 2, "dim": 64},
    "Gemma 3": {"heads": 4, "kv_heads": 1, "dim": 256, "window": 512},
    "Llama 3": {"heads": 32, "kv_heads": 8, "dim": 128},
}
BF16, FLOAT = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def fresh_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


@pytest.mark.parametrize(
    ("gpu", "model", "dtype", "page"),
    [
        ("H100", "Qwen3", BF16, 64),
        ("A100", "Qwen2.5", BF16, 16),
        *(
            pytest.param(gpu, model, dtype, 256, marks=pytest.mark.slow)
            for gpu in ("A100", "H100")
            for model in MODELS
            for dtype in (BF16, FLOAT)
        ),
    ],
)
def test_attention_compiles(gpu: str, model: str, dtype: torch.dtype, page: int) -> None:
    sizes = MODELS[model]
    queries = torch.zeros(48, sizes["heads"], sizes["dim"], dtype=dtype)
    pool = torch.zeros(2, 4, page, sizes["kv_heads"], sizes["dim"], dtype=dtype)
    starts = torch.tensor([0, 1, 40, 48], dtype=torch.int32)
    with compiling_for(gpu) as kernels:
        paged_attention(
            queries,
            *pool,
            torch.zeros(3, 8, dtype=torch.int32),
            torch.ones(3, dtype=torch.int32),
            starts,
            longest=5000,
            window=sizes.get("window"),
            is_decode_only=False,
            splits=8,
        )
    for each in kernels:
        print(gpu, model, dtype, each)
    assert [each.name for each in kernels] == ["_attend", "_merge", "_attend"], "decoding, its splits merged, prompts"
    # in float32, which only checks use, up to eight registers
    assert max(each.spilled_bytes for each in kernels) <= (32 if dtype is FLOAT else 0)


def test_splits_fill_the_processors() -> None:
    h100 = 132
    assert number_of_splits(8, 40_960, h100) == 64, "one request, at most as many as merging is worth"
    assert number_of_splits(8, 1024, h100) == 4, "not below 256 keys each"
    assert number_of_splits(64 * 8, 2048, h100) == 1, "full already"
    assert number_of_splits(64 * 8, 32_768, h100) == 4, "one long request must not keep one processor busy after all others"
    assert number_of_splits(8, 1, h100) == 1


@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_swiglu_compiles(gpu: str) -> None:
    given = torch.zeros(7, 2 * 3072, dtype=BF16)
    with compiling_for(gpu) as kernels:
        out = Swiglu.apply(given.requires_grad_())
        out.sum().backward()
    assert [each.name for each in kernels] == ["_swiglu_forward", "_swiglu_backward"]
    assert not any(each.spilled_bytes for each in kernels)


@pytest.mark.parametrize("with_entropies", [False, True])
@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_kernels_of_logits_compile(gpu: str, with_entropies: bool) -> None:
    logits, targets, per_token = torch.zeros(3, 151_936), torch.zeros(3, dtype=torch.long), torch.zeros(3)
    of_entropies = per_token if with_entropies else None
    with compiling_for(gpu) as kernels:
        row_scores(logits, targets, with_entropies=with_entropies)
        slopes(logits, targets, per_token, per_token, per_token, of_entropies, factor=1.0, dtype=BF16)
    for each in kernels:
        print(gpu, with_entropies, each)
    assert [each.name for each in kernels] == ["_read", "_slope"]
    assert not any(each.spilled_bytes for each in kernels)


@pytest.mark.parametrize("dtype", [BF16, FLOAT])
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_heads_compile(gpu: str, dim: int, dtype: torch.dtype) -> None:
    mixed = torch.zeros(5, 1, 8 * 4 * dim, dtype=dtype, requires_grad=True)
    weights = [torch.ones(dim, dtype=dtype, requires_grad=True) for _ in range(2)]
    rotation = Rotation.by(torch.zeros(5, 1, 1, dim), dtype)
    with compiling_for(gpu) as kernels:
        query, key, value = query_key_value(mixed, rotation, HeadNorms(*weights, 1e-6), groups=8, dim=dim)
        (query.sum() + key.sum() + value.sum()).backward()
    for each in kernels:
        print(gpu, dim, dtype, each)
    assert [each.name for each in kernels] == ["_heads_forward", "_heads_backward"]
    assert not any(each.spilled_bytes for each in kernels)


@pytest.mark.parametrize("width", [1024, 5120, 8192])
@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_norms_compile(gpu: str, width: int) -> None:
    row = torch.zeros(5, width, dtype=BF16, requires_grad=True)
    with compiling_for(gpu) as kernels:
        RmsNorm.apply(row, torch.ones(width, dtype=BF16, requires_grad=True), 1e-6).sum().backward()
    assert [each.name for each in kernels] == ["_norm_backward"]
    assert not any(each.spilled_bytes for each in kernels)


@pytest.mark.parametrize("width", [1024, 5120, 8192])
@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_sums_with_norms_compile(gpu: str, width: int) -> None:
    row = torch.zeros(5, 1, width, dtype=BF16)
    with compiling_for(gpu) as kernels:
        add_and_norm(row, row, torch.ones(width, dtype=BF16), 1e-6)
    assert [each.name for each in kernels] == ["_add_and_norm"]
    assert not any(each.spilled_bytes for each in kernels)
