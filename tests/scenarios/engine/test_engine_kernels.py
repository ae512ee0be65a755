"""The engine with the kernels that it has on a GPU, which Triton interprets here."""

from tests.support.interpreted import interpreted


def test_with_tritons_kernels_the_engine_is_a_full_forward_pass() -> None:
    assert interpreted("tests.scenarios.engine.interpreted_engine") < 1e-5
