"""Pinned memory: tensors share blocks of a power of 2, and little of these is left."""

from __future__ import annotations

import torch

from learner.pinned_memory import PinnedMemory

LAYER = ((9728, 2560), (2560, 6144), (4096, 2560), (19456, 2560), (2560,))
"""Matrices and a norm of Qwen3-4B; below, a thousandth of them each."""


def test_every_key_has_memory_of_its_own_that_stays() -> None:
    memory, generator = PinnedMemory(block_bytes=4096), torch.Generator().manual_seed(1)
    given = [
        torch.randint(0, 100, size, generator=generator).to(dtype)
        for size, dtype in (((3,), torch.uint8), ((7, 5), torch.float32), ((0,), torch.float32), ((4000,), torch.bfloat16))
    ]
    homes = [memory.home(number, each).copy_(each) for number, each in enumerate(given)]
    for number, each in enumerate(given):
        assert torch.equal(homes[number], each)
        assert (homes[number].dtype, homes[number].shape) == (each.dtype, each.shape)
        assert memory.home(number, each).data_ptr() == homes[number].data_ptr()
    assert len(memory) == len(given)


def test_what_rounding_to_powers_of_2_takes_is_used() -> None:
    memory = PinnedMemory(block_bytes=2**18)
    needed, alone, blocks = 0, 0, dict[int, int]()
    for layer in range(36):
        for matrix, (rows, *columns) in enumerate(LAYER):
            for kind in ("exp_avg", "exp_avg_sq"):
                moment = torch.empty(rows // 32, *(each // 32 for each in columns))
                storage = memory.home((layer, matrix, kind), moment).untyped_storage()
                needed, alone = needed + moment.nbytes, alone + 2 ** (moment.nbytes - 1).bit_length()
                blocks[storage.data_ptr()] = storage.nbytes()
    assert all(size.bit_count() == 1 for size in blocks.values())
    assert sum(blocks.values()) < 1.08 * needed < 1.3 * needed < alone
