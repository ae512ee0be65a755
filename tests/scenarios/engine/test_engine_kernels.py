"""The engine with the kernels that it has on a GPU, which Triton interprets here."""

from tests.support.engine_stage import SHAPE
from tests.support.interpreted import interpreted


def test_with_tritons_kernels_the_engine_is_a_full_forward_pass_and_decodes_alike_on_the_tensors_of_graphs() -> None:
    sums_per_other_norm, from_forward_pass, with_padding, *without_padding = interpreted(
        "tests.scenarios.engine.interpreted_engine"
    )
    assert sums_per_other_norm == 2 * SHAPE.layers, "all norms but a step's first one are computed with the sum before them"
    assert from_forward_pass < 1e-5
    assert with_padding < 1e-5
    assert without_padding == [0.0, 0.0], "dense, and with experts"
