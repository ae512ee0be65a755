"""Files of a checkpoint: what is in them, whose they are, and that training need not wait for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from async_rl.checkpoint_draft import Draft, write_tensors
from async_rl.checkpoint_files import facts_of, file_of
from async_rl.megatron import parallel
from learner.checkpoints.writing import CheckpointWriter


@pytest.fixture
def writer() -> Iterator[CheckpointWriter]:
    parallel.initialize(device=torch.device("cpu"))
    made = CheckpointWriter()
    yield made
    made.close()
    parallel.shutdown()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldUp(Draft):
    """By a disk that is slow to begin."""

    may_open: threading.Event

    def open(self) -> None:
        self.may_open.wait()
        super(HeldUp, self).open()


def test_what_is_written_are_the_numbers_when_it_began(writer: CheckpointWriter, tmp_path: Path):
    draft = HeldUp(final=tmp_path / "step-00000001", may_open=threading.Event())
    trained, found = torch.arange(6.0), dict[str, torch.Tensor]()
    written = writer.begin(draft, {"trained": trained[2:]}, lambda _files: found.update(load_file(draft.folder / file_of(0))))
    trained += 1
    draft.may_open.set()
    assert written.result().bytes > 0
    assert found["trained"].tolist() == [2, 3, 4, 5]


def test_a_file_is_what_safetensors_reads_and_what_its_digest_says(tmp_path: Path):
    tensors = {
        "bytes": torch.arange(5, dtype=torch.uint8),
        "half": torch.randn(7).to(torch.bfloat16),
        "longer than a chunk": torch.randn(3_000_000),
        "one": torch.randn(1),
    }
    facts = write_tensors(tmp_path / "file", tensors)
    assert facts == facts_of(tmp_path / "file")
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items())


def test_a_draft_of_a_later_life_is_left_alone(tmp_path: Path):
    earlier, later = (Draft.of(tmp_path, step=9, life=life) for life in (5, 7))
    later.open()
    earlier.open()
    assert later.folder.is_dir()
    Draft.of(tmp_path, step=3, life=7).open()
    assert [path.name for path in tmp_path.iterdir()] == [".step-00000003-by-7.partial"]
