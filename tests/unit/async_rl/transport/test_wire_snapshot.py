"""Snapshots as files: what others can read of them, and what never passes for one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from async_rl.errors import WireError
from async_rl.models.parameter_spec import ParameterSpec
from async_rl.transport import snapshot
from async_rl.transport.digest import chunk_digest, chunks_of, version_digest
from async_rl.transport.packed_versions import PackedVersions
from async_rl.transport.plan import Box, plan_layout
from async_rl.transport.snapshot import SnapshotManifest
from async_rl.types import VersionRecord

TENSORS = {
    "embedding": torch.arange(300.0).reshape(20, 15),
    "norm": torch.arange(7.0).bfloat16(),
    "scale": torch.tensor(3, dtype=torch.int64),
}
SPECS = [
    ParameterSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
    for name, tensor in TENSORS.items()
]
HELD = {Box.whole(spec): TENSORS[spec.name] for spec in SPECS}
LAYOUT = plan_layout(SPECS, {0: list(HELD), 1: list(HELD)})


def parcel(number: int) -> torch.Tensor:
    versions = PackedVersions(LAYOUT, LAYOUT.parcels[number], torch.device("cpu"), shared=False)
    versions.add(0, HELD, keep=())
    return versions.parcel(0).clone()


def digests(data: torch.Tensor) -> tuple[str, ...]:
    return tuple(chunk_digest(part) for part in chunks_of(data))


def manifest(version: int) -> SnapshotManifest:
    chunks = tuple(digests(parcel(number)) for number in range(2))
    record = VersionRecord(version=version, timeline="a", step=version, digest=version_digest(LAYOUT.digest, chunks))
    return SnapshotManifest(record=record, layout=LAYOUT, chunks=chunks)


def leave(root: Path, version: int) -> Path:
    with snapshot.drafting(root, version) as draft:
        for number in range(2):
            snapshot.write_parcel(draft, number, LAYOUT, parcel(number))
        snapshot.commit(draft, manifest(version))
    return snapshot.folder_of(root, version)


def read(root: Path, number: int, version: int = 3) -> torch.Tensor:
    found = snapshot.read_manifest(root, version)
    assert found is not None
    data = torch.empty(LAYOUT.parcels[number].num_bytes, dtype=torch.uint8)
    snapshot.read_parcel(root, found, number, data, lambda _: None)
    return data


def test_it_is_read_back_byte_for_byte(tmp_path: Path) -> None:
    leave(tmp_path, 3)
    assert snapshot.read_manifest(tmp_path, 3) == manifest(3)
    for number in range(2):
        assert torch.equal(read(tmp_path, number), parcel(number))


def test_its_files_open_anywhere(tmp_path: Path) -> None:
    folder = leave(tmp_path, 3)
    found = {name: tensor for number in range(2) for name, tensor in load_file(snapshot.file_of(folder, number)).items()}
    parts = sorted((name for name in found if name.startswith("embedding")), key=lambda name: int(name[10:].partition(":")[0]))
    assert len(parts) > 1, "several ranks send a part"
    assert torch.equal(torch.cat([found[part] for part in parts]), TENSORS["embedding"])
    assert torch.equal(found["norm"], TENSORS["norm"])
    assert torch.equal(found["scale"], TENSORS["scale"])


def test_nothing_is_seen_before_everything_is_there(tmp_path: Path) -> None:
    with snapshot.drafting(tmp_path, 3) as draft:
        for number in range(2):
            assert snapshot.read_manifest(tmp_path, 3) is None
            snapshot.write_parcel(draft, number, LAYOUT, parcel(number))
        assert snapshot.read_manifest(tmp_path, 3) is None
        snapshot.commit(draft, manifest(3))
    assert snapshot.read_manifest(tmp_path, 3) is not None


def test_the_newest_are_kept_and_drafts_of_the_dead_removed(tmp_path: Path) -> None:
    for version in (1, 2):
        leave(tmp_path, version)
    (tmp_path / ".version-00000003.partial").mkdir()
    (tmp_path / "version-of-a-person").mkdir()
    with snapshot.drafting(tmp_path, 9) as of_a_later_learner:
        leave(tmp_path, 3)
        leave(tmp_path, 4)
        kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"version-00000003", "version-00000004", "version-of-a-person", of_a_later_learner.name}


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "manifest.json").write_text("{"), "cannot be read"),
        (lambda folder: snapshot.file_of(folder, 1).unlink(), "No such file"),
        (lambda folder: snapshot.file_of(folder, 1).write_bytes(b""), "too short"),
        (lambda folder: snapshot.file_of(folder, 1).write_bytes(snapshot.file_of(folder, 1).read_bytes()[:-1]), "too short"),
    ],
)
def test_what_is_not_whole_is_named(tmp_path: Path, damage: Callable[[Path], object], says: str) -> None:
    damage(leave(tmp_path, 3))
    with pytest.raises(WireError, match=says):
        read(tmp_path, 1)
