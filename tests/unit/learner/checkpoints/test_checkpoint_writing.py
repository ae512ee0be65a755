"""Files of a checkpoint: what is in them, whose they are, and that training need not wait for them."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from async_rl.checkpoints.draft import Draft, write_tensors
from async_rl.checkpoints.manifest import (
    FORMAT,
    FileFacts,
    Layout,
    Manifest,
    candidates,
    check_files,
    facts_of,
    file_of,
    read_manifest,
)
from async_rl.durable import failpoints
from async_rl.errors import CheckpointError
from async_rl.megatron import parallel
from learner.checkpoints.writing import CheckpointWriter
from learner.pinned_memory import PinnedMemory


@pytest.fixture
def writer() -> Iterator[CheckpointWriter]:
    parallel.initialize(device=torch.device("cpu"))
    made = CheckpointWriter()
    yield made
    failpoints.arm("")
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


class OnGpu(torch.Tensor):
    """Says that it lies on a GPU, which is not here."""

    is_cuda = property(lambda _: True)  # pyright: ignore[reportAssignmentType]


def test_moments_on_the_host_are_those_that_the_device_brings_last(
    writer: CheckpointWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`optimizer.offload`: an update ends before its moments have come from the device, in a copy that is still queued."""
    weight, moment = torch.zeros(4).as_subclass(OnGpu), torch.zeros(4)
    monkeypatch.setattr(PinnedMemory, "home", lambda *_: torch.empty(4))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: moment.fill_(1))
    found = dict[str, torch.Tensor]()
    draft = Draft.of(tmp_path, step=1)
    tensors = {"moment": moment, "weight": weight}
    writer.begin(draft, tensors, lambda _files: found.update(load_file(draft.folder / file_of(0)))).result()
    assert found["moment"].tolist() == [1] * 4
    assert found["weight"].tolist() == [0] * 4


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


@pytest.mark.parametrize("order", ["whole_file.writing:1=ENOSPC", "checkpoint.writing:2=EIO", "whole_file.written:1=ENOSPC"])
def test_a_disk_that_refuses_costs_one_checkpoint(writer: CheckpointWriter, tmp_path: Path, order: str):
    """While its tensors are written, between them, or when its manifest is to be renamed."""

    def save(step: int) -> None:
        draft = Draft.of(tmp_path, step)

        def complete(files: dict[str, FileFacts]) -> None:
            draft.commit(Manifest(format=FORMAT, step=step, layout=Layout(), models={}, files=files, extra={}))

        writer.begin(draft, {"one": torch.arange(9.0)}, complete).result()

    save(1)
    failpoints.arm(order)
    with pytest.raises(CheckpointError, match="older checkpoints are untouched"):
        save(2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    save(3)
    for checkpoint in candidates(tmp_path):
        check_files(checkpoint, manifest := read_manifest(checkpoint), manifest.files)
    assert [path.name for path in candidates(tmp_path)] == ["step-00000003", "step-00000001"]


def test_a_disk_that_takes_a_part_of_a_file_is_noticed(tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, hard))  # the kernel writes as much, then refuses
    try:
        with pytest.raises(OSError, match="File too large"):
            write_tensors(tmp_path / "file", {"large": torch.zeros(3_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "file").stat().st_size == 5_000_000
