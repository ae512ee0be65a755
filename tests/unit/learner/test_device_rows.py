"""Rows go to a device in one copy, and arrive as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from learner.batches.device_rows import DeviceRow, moved
from learner.batches.packed_rows import DTYPES, PackedRow, from_buffers, to_buffers

WIDENED = {"token_ids", "positions", "targets", "group_ids"}


def row(lengths: list[int]) -> PackedRow:
    random = np.random.default_rng(len(lengths))
    columns: dict[str, Any] = {name: random.integers(0, 9, sum(lengths)).astype(dtype) for name, dtype in DTYPES.items()}
    columns |= {"cu_seqlens": np.cumsum([0, *lengths], dtype=np.int32), "group_ids": np.arange(len(lengths), dtype=np.int32)}
    return PackedRow(**columns)


@pytest.mark.parametrize("lengths", [[1], [5, 2], [130, 1, 64]])
def test_every_column_arrives(lengths: list[int]) -> None:
    source = row(lengths)
    for sent in (source, from_buffers([bytes(each) for each in to_buffers(source)])):  # what a rank has received is read-only
        found = DeviceRow.on_device(sent, torch.device("cpu"))
        for name, dtype in DTYPES.items():
            column: torch.Tensor = getattr(found, name)
            np.testing.assert_array_equal(column.numpy(), getattr(source, name))
            assert column.dtype == (torch.int64 if name in WIDENED else torch.from_numpy(np.empty(0, dtype)).dtype), name
        assert found.packing.max_seqlen_q == max(lengths)
        assert found.packing.cu_seqlens_q.tolist() == source.cu_seqlens.tolist()


def test_a_row_without_tokens_is_a_filler() -> None:
    assert DeviceRow.on_device(row([]), torch.device("cpu")).is_filler


def test_columns_share_one_buffer_and_none_of_its_bytes() -> None:
    columns = {"a": np.arange(3, dtype=np.uint8), "b": np.zeros(0, np.float32), "c": np.arange(70, dtype=np.int64)}
    found = moved(columns, torch.device("cpu"))
    assert len({each.untyped_storage().data_ptr() for each in found.values()}) == 1
    assert all(each.data_ptr() % each.element_size() == 0 for each in found.values())
    found["a"].fill_(7)
    assert found["c"].tolist() == [*range(70)]
    assert found["b"].shape == (0,)
