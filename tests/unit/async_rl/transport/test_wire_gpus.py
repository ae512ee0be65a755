"""Which processes can meet over NCCL."""

import pytest
import torch

from async_rl.transport.wire.gpus import backend_among, gpu_of


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [
        (["a", "b", "c"], "nccl"),
        (["a", "b", "a"], "gloo"),
        (["a", ""], "gloo"),
        (["", ""], "gloo"),
    ],
)
def test_nccl_takes_ranks_with_a_gpu_each(gpus: list[str], backend: str) -> None:
    assert backend_among(gpus) == backend


def test_a_cpu_is_no_gpu() -> None:
    assert gpu_of(torch.device("cpu")) == ""
