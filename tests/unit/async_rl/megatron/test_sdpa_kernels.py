"""Engines on a GPU keep cuDNN out of torch's SDPA, which has a switch for it in every build."""

from collections.abc import Iterator

import pytest
import torch

from async_rl.megatron.attention.gathered_pages import keep_cudnn_out


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize(("device", "has_cudnn"), [("cuda", False), ("cpu", True)])
def test_cudnn_is_kept_out_on_gpus_alone(device: str, has_cudnn: bool) -> None:
    keep_cudnn_out(torch.device(device))
    assert torch.backends.cuda.cudnn_sdp_enabled() is has_cudnn
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()
