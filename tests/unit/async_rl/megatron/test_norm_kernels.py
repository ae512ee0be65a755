"""RMSNorm's backward pass, and a sum with its norm, as kernels in Triton's interpreter."""

from __future__ import annotations

from tests.support.interpreted import interpreted


def test_the_kernel_computes_what_torch_does() -> None:
    found = interpreted("tests.unit.async_rl.megatron.norm_cases")
    assert len(found) == 16
    for name, difference in found.items():
        assert difference < (1e-6 if "float32" in name else 2**-7), name
