"""What a fleet on Ray needs when its cluster has several machines, or gets them later."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.launch import fleet_plan as plan
from async_rl.launch.member_spec import member_spec
from async_rl.launch.ray.reach import check, wire_host
from async_rl.supervision import RestartPolicy
from tests.support.run_processes import read_config, write_config

ONE, TWO = {"10.0.0.4"}, {"10.0.0.4", "10.0.0.5"}


def config(folder: Path, *, url: str, insecure: bool) -> Config:
    return read_config(write_config(folder, "fleet", redis={"url": url}, wire={"insecure": insecure}))


@pytest.mark.parametrize(
    ("url", "insecure", "lacks"),
    [
        ("", False, "redis.url is empty, but the Ray cluster has 2 machines: name a server that all of them reach"),
        ("redis://10.0.0.2", False, "wire.insecure is false, but the Ray cluster has 2 machines.* set wire.insecure: true"),
        ("redis://10.0.0.2", True, None),
    ],
)
def test_what_processes_on_several_machines_lack_is_told(tmp_path: Path, url: str, insecure: bool, lacks: str | None) -> None:
    given = config(tmp_path, url=url, insecure=insecure)
    check(given, ONE)
    if lacks is None:
        check(given, TWO)
    else:
        with pytest.raises(ConfigError, match=lacks):
            check(given, TWO)


@pytest.mark.parametrize(
    ("url", "insecure", "host"),
    [("", True, "127.0.0.1"), ("redis://10.0.0.2", False, "127.0.0.1"), ("redis://10.0.0.2", True, "10.0.0.4")],
)
def test_a_learner_sends_weights_from_its_machine_if_others_may_join(
    tmp_path: Path, url: str, insecure: bool, host: str
) -> None:
    """However many machines there are when it starts."""
    given = config(tmp_path, url=url, insecure=insecure)
    (learner,) = plan.learner(given, has_gpus=False).members
    (worker,) = plan.worker(given, 0, has_gpus=False).members
    path, policy, address = tmp_path / "fleet.yaml", RestartPolicy(), wire_host(given, "10.0.0.4")
    words = member_spec(learner, given, path, os.environ, address=address, policy=policy, log=None).command
    if host == given.wire.host:
        assert "--wire.host" not in words
    else:
        assert words[-2:] == ["--wire.host", host]
    assert "--wire.host" not in member_spec(worker, given, path, os.environ, address=address, policy=policy, log=None).command
