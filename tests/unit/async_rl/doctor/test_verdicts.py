"""Tables of facts and what the doctor says of them."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from async_rl.config import Config
from async_rl.doctor.cgroup import CgroupLimits, read_limits
from async_rl.doctor.disk import DiskFacts, judge_disk
from async_rl.doctor.gpu import GpuFacts, judge_gpu
from async_rl.doctor.network import ListenAttempt, NetworkFacts, gather_network, judge_network
from async_rl.doctor.resources import ResourceFacts, judge_resources
from async_rl.doctor.verdict import GIB, MIB, refuse_unfit
from async_rl.doctor.versions import VersionFacts, judge_versions
from async_rl.errors import UnfitMachine

FIT = ResourceFacts(
    cores=8, memory=64 * GIB, memory_free=32 * GIB, shm=8 * GIB, shm_free=8 * GIB, descriptors=None, processes=None
)
DISK = DiskFacts(check="disk", folder=Path("/data"), kind="ext4", size=100 * GIB, free=50 * GIB, write_s=(0.002, 0.003))
GPU = GpuFacts(driver="580.1", cuda="13.0", gpus=("H200", "H200"), nccl="2.28")


def levels(verdicts: object) -> dict[str, str]:
    return {each.check: each.level for each in verdicts if each.level != "ok"}  # pyright: ignore


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {}),
        ({"omp_threads": "16"}, {"cpu": "look"}),
        ({"cgroup": CgroupLimits(cores=2)}, {"cpu": "look"}),
        ({"cgroup": CgroupLimits(cores=2), "omp_threads": "2"}, {}),
        ({"memory_free": GIB}, {"memory": "look"}),
        ({"cgroup": CgroupLimits(memory=4 * GIB, memory_used=3 * GIB)}, {"memory": "look"}),
        ({"memory_free": GIB, "memory_needed": 2 * GIB}, {"memory": "bad"}),
        ({"shm": None}, {"shared memory": "look"}),
        ({"shm": 64 * MIB, "shm_free": 64 * MIB}, {"shared memory": "look"}),
        ({"shm_free": MIB}, {"shared memory": "look"}),
        ({"descriptors": 200}, {"file descriptors": "bad"}),
        ({"descriptors": 1024}, {"file descriptors": "look"}),
        ({"cgroup": CgroupLimits(processes=100)}, {"processes": "look"}),
    ],
)
def test_resources(change: dict[str, object], expected: dict[str, str]) -> None:
    assert levels(judge_resources(replace(FIT, **change))) == expected  # pyright: ignore


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {}),
        ({"problem": "Permission denied"}, {"disk": "bad"}),
        ({"free": MIB}, {"disk": "bad"}),
        ({"needed": 200 * GIB}, {"disk": "bad"}),
        ({"free": 2 * GIB}, {"disk": "look"}),
        ({"write_s": (0.5, 0.6)}, {"disk": "look"}),
        ({"kind": "overlay"}, {"disk": "look"}),
        ({"kind": "tmpfs", "may_go_away": True}, {}),
        ({"kind": "nfs4"}, {}),
        ({"kind": "nfs4", "holds_redis": True}, {"disk": "look"}),
    ],
)
def test_disk(change: dict[str, object], expected: dict[str, str]) -> None:
    assert levels(judge_disk(replace(DISK, **change))) == expected  # pyright: ignore


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (GpuFacts(), {}),
        (GpuFacts(required=True), {"gpu": "bad"}),
        (GPU, {}),
        (replace(GPU, cuda=""), {"gpu": "bad"}),
        (replace(GPU, gpus=()), {"gpu": "bad"}),
        (replace(GPU, shared=True), {"gpu sharing": "look"}),
        (replace(GPU, shared=True, mps="runs"), {}),
        (replace(GPU, compute_mode="Exclusive_Process"), {"gpu sharing": "look"}),
    ],
)
def test_gpu(facts: GpuFacts, expected: dict[str, str]) -> None:
    assert levels(judge_gpu(facts)) == expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (NetworkFacts(address="127.0.0.1", wire_host="127.0.0.1"), {}),
        (NetworkFacts(address="10.0.0.1", wire_host="127.0.0.1"), {"way to Redis": "look"}),
        (NetworkFacts(address="10.0.0.2", wire_host=""), {}),
        (NetworkFacts(problem="no way", wire_host=""), {"way to Redis": "bad"}),
    ],
)
def test_way_to_redis(facts: NetworkFacts, expected: dict[str, str]) -> None:
    assert levels(judge_network(facts)) == expected


@pytest.mark.parametrize(
    ("setting", "problem", "is_live", "level"),
    [
        ("worker.gateway", errno.EADDRINUSE, False, "bad"),
        ("worker.gateway", errno.EADDRINUSE, True, "ok"),
        ("worker.gateway", errno.EADDRNOTAVAIL, False, "bad"),
        ("wire.host", errno.EADDRNOTAVAIL, False, "look"),
    ],
)
def test_listeners(setting: str, problem: int, is_live: bool, level: str) -> None:
    listener = ListenAttempt(setting=setting, host="10.0.0.9", port=80, problem=problem)
    *_, verdict = judge_network(NetworkFacts(address="127.0.0.1", wire_host="", listeners=(listener,), is_live=is_live))
    assert verdict.level == level


def test_where_only_a_worker_runs_the_learners_addresses_are_not_tried() -> None:
    asked = {"wire": {"host": "192.0.2.1", "insecure": True}, "metrics": {"prometheus_port": 9400}}
    needed = {"model": {"size": {"hidden": 8, "layers": 1, "heads": 1}}, "environments": [{"type": "counting"}]}
    config = Config.model_validate({**asked, **needed})
    both, worker = (gather_network(config, only_worker=only, is_live=False) for only in (False, True))
    assert [each.setting for each in both.listeners] == ["worker.gateway", "wire.host", "metrics.prometheus_port"]
    assert [each.setting for each in worker.listeners] == ["worker.gateway"]
    assert (both.wire_host, worker.wire_host) == ("192.0.2.1", "")


def test_what_is_missing_is_named_and_ends_with_a_code_of_its_own() -> None:
    verdicts = list(judge_versions(VersionFacts(installed={}, unmet=("torch >=2.11",))))
    assert verdicts[0].line.startswith("bad   software: async_rl needs torch >=2.11 — ")
    with pytest.raises(UnfitMachine, match="1 check is bad: software"):
        refuse_unfit(verdicts)


def test_the_tightest_limit_of_nested_cgroups(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "cgroup.controllers").touch()
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text(f"{GIB}\n")
    (inner.parent / "memory.current").write_text(f"{MIB}\n")
    (inner.parent / "memory.stat").write_text("anon 1\ninactive_file 1024\n")
    (inner / "cpu.max").write_text("150000 100000\n")
    assert read_limits(tmp_path, "0::/outer/inner\n") == CgroupLimits(cores=1.5, memory=GIB, memory_used=MIB - 1024)
