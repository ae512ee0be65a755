"""The engine with the kernels that it has on a GPU, which Triton interprets here."""

from tests.support.interpreted import interpreted


def test_with_tritons_kernels_the_engine_is_a_full_forward_pass_and_decodes_alike_on_the_tensors_of_graphs() -> None:
    from_forward_pass, with_padding, *without_padding = interpreted("tests.scenarios.engine.interpreted_engine")
    assert from_forward_pass < 1e-5
    assert with_padding < 1e-5
    assert without_padding == [0.0, 0.0], "dense, and with experts"
