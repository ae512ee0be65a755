"""The configuration that a learner shares, and what a worker that joins takes: no code or file it did not allow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from async_rl import __version__
from async_rl.board.shared_config import NOTE, read_shared, refuse_foreign, share, shared
from async_rl.config import Config
from async_rl.config.tree import PROTOCOL
from async_rl.errors import AsyncRLError, ConfigError, FleetMismatch
from async_rl.replay_protocol import Limits
from buffer.reference.memory_board import MemoryBoard
from buffer.reference.memory_buffer import MemoryBuffer

RUN: dict[str, Any] = {
    "run": {"name": "shapes", "seed": 7, "folder": "/srv/theirs"},
    "redis": {"url": "redis://10.0.0.1:6379", "insecure": True, "password_file": "/etc/theirs"},
    "model": {"size": {"hidden": 32, "layers": 1, "heads": 2}},
    "environments": [{"type": "counting"}],
    "environments_from": ["theirs/"],
    "sampling": {"temperature": 0.5},
    "worker": {"groups_in_flight": 3, "gateway": {"host": "0.0.0.0", "max_concurrent": 5}},
    "metrics": {"wandb_project": "theirs"},
}


def note(**sections: Any) -> bytes:
    return shared(Config.model_validate({**RUN, **sections})).model_dump_json().encode()


def join(found: bytes | None, *words: str) -> Config:
    return refuse_foreign(read_shared(found, "shapes", words))


async def test_a_worker_takes_the_runs_settings_and_keeps_those_of_its_machine():
    buffer = MemoryBuffer()
    board = MemoryBoard(buffer)
    fence = await buffer.acquire("learner", Limits(max_age=0, groups_per_step=2, lease_s=30, max_attempts=1))
    run = Config.model_validate(RUN)
    await share(board, run, fence=fence)
    config = join(await board.note(NOTE), "--redis.url", "redis://127.0.0.1:1", "--worker.groups_in_flight", "4")
    assert config.fleet_facts == run.fleet_facts
    assert (config.run.name, config.sampling.temperature, config.worker.gateway.max_concurrent) == ("shapes", 0.5, 5)
    assert (config.worker.groups_in_flight, config.redis.url) == (4, "redis://127.0.0.1:1"), "its own words count more"
    assert (config.worker.gateway.host, config.run.folder) == ("127.0.0.1", Path("runs"))
    assert (config.redis.password_file, config.environments_from, config.metrics.wandb_project) == (None, (), "")


def test_a_model_of_the_hub_is_fetched_where_the_worker_is():
    found = json.loads(note(model={"name": "org/model", "folder": "/cache/of/the/learner", "revision": "abc"}))
    assert found["config"]["model"] == {**found["config"]["model"], "name": "org/model", "revision": "abc", "folder": None}
    assert found["config"]["tokenizer"]["folder"] is None


CODE = [{"type": "my_environment.py:Mine"}]
FOREIGN: list[tuple[Mapping[str, Any], str]] = [
    ({"environments": CODE}, "my_environment.py"),
    ({"environments": [{"type": "subprocess:Popen"}]}, "subprocess"),
    ({"environments": [{"type": "dataset", "args": {"path": "org/rows", "scoring": "os:system"}}]}, "os"),
    ({"environments": [{"type": "gymnasium", "args": {"id": "Taxi-v3"}}]}, "gymnasium"),
    ({"environments": [{"type": "dataset", "args": {"path": "/etc/passwd"}}]}, "/etc/passwd"),
    ({"environments": [{"type": "dataset", "args": {"path": "../rows.jsonl"}}]}, "../rows.jsonl"),
    ({"environments": [{"type": "dataset", "args": {"path": "~/rows.jsonl"}}]}, "~/rows.jsonl"),
    ({"environments": [{"type": "dataset", "args": {"path": "rows.jsonl"}}]}, "rows.jsonl"),
    ({"environments": [{"type": "remote", "args": {"url": "http://a:1", "token_file": "rows.jsonl"}}]}, "rows.jsonl"),
    ({"model": {"folder": "models/tiny"}, "tokenizer": {"type": "characters"}}, "models/tiny"),
    ({"tokenizer": {"type": "huggingface", "folder": "models/tiny"}}, "models/tiny"),
    ({"policies": {"judge": {"type": "openai", "url": "http://evil/v1", "api_key_file": "/home/key"}}}, "/home/key"),
    ({"worker": {"backend": "engines/mine.py:Engine"}}, "engines/mine.py"),
    ({"wire": {"snapshots": "/srv/snapshots"}}, "/srv/snapshots"),
]


@pytest.mark.parametrize(("sections", "place"), FOREIGN, ids=[place for _, place in FOREIGN])
def test_code_and_files_need_the_leave_of_the_workers_own_operator(
    sections: Mapping[str, Any], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").touch()
    found = note(**sections, environments_from=[place, "/", "."])  # the run's own leave is not sent
    with pytest.raises(ConfigError) as refused:
        join(found)
    assert "does not join run 'shapes'" in str(refused.value)
    assert f"{place}]' allows it" in str(refused.value)
    allowed = join(found, "--environments_from", f"[{place}]")
    assert allowed.environments_from == (place,)


def written_by_hand(**sections: Any) -> bytes:
    """A note with sections that no learner sends, over those that it does."""
    sent = json.loads(note())
    return json.dumps({**sent, "config": {**sent["config"], **sections}}).encode()


EVERYTHING: dict[str, Any] = Config.model_validate(RUN).model_dump(mode="json")
SENT: dict[str, Any] = json.loads(note())["config"]
NOT_SENT: dict[str, Mapping[str, Any]] = {
    **{key: {key: value} for key, value in EVERYTHING.items() if key not in SENT},
    **{f"run.{key}": {"run": {key: value}} for key, value in EVERYTHING["run"].items() if key not in SENT["run"]},
    **{
        f"worker.gateway.{key}": {"worker": {"gateway": {key: value}}}
        for key, value in EVERYTHING["worker"]["gateway"].items()
        if key not in SENT["worker"]["gateway"]
    },
}
"""Each setting of the machine's own, by key."""


def test_every_setting_of_a_machines_own_is_known_as_such():
    assert {
        *("environments_from", "redis", "device", "metrics", "supervision", "launch", "run.folder"),
        *("worker.gateway.host", "worker.gateway.port", "worker.gateway.advertised_host"),
    } <= NOT_SENT.keys()


@pytest.mark.parametrize("key", NOT_SENT)
def test_a_note_that_sets_what_is_the_machines_own_is_refused(key: str):
    found = written_by_hand(**NOT_SENT[key])
    with pytest.raises(FleetMismatch, match=f"sets {key}.*, which is this machine's own"):
        join(found)
    with pytest.raises(FleetMismatch):  # `fleet --address` and `doctor --join` read no more than this
        read_shared(found, "shapes", ("--environments_from", "[/]"))


def test_a_note_cannot_give_itself_leave(tmp_path: Path):
    code = tmp_path / "theirs.py"
    code.write_text("raise AssertionError('it was imported')")
    found = written_by_hand(environments_from=["/"], environments=[{"type": f"{code}:Any"}])
    with pytest.raises(FleetMismatch, match="sets environments_from, which is this machine's own"):
        join(found)


def test_the_run_is_the_one_that_was_asked_for():
    assert join(written_by_hand(run={"name": "another", "seed": 3})).run.name == "shapes"


def test_a_path_of_the_machines_own_words_needs_no_leave():
    found = note(model={"folder": "models/tiny"}, tokenizer={"type": "characters"})
    assert join(found, "--model.folder", "/models/tiny").model.folder == Path("/models/tiny")


def test_what_only_looks_like_a_file_is_let_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    args = {"path": "openai/gsm8k", "split": "train[:95%]", "system": "Say: yes or no. " * 400}
    assert join(note(environments=[{"type": "dataset", "args": args}])).environments[0].args == args


def changed(**values: Any) -> bytes:
    return json.dumps({**json.loads(note()), **values}).encode()


DEEP: Any = "value"
for _ in range(120):
    DEEP = [DEEP]
REFUSED: list[tuple[bytes | None, Sequence[str], type[AsyncRLError], str]] = [
    (None, (), ConfigError, "run 'shapes' has no configuration in this Redis"),
    (b"{", (), FleetMismatch, "cannot be read here"),
    (
        changed(protocol=PROTOCOL + 1, release="9.9", config={"newer": 1}),
        (),
        FleetMismatch,
        f"speaks protocol {PROTOCOL + 1} (async_rl 9.9), and this async_rl {__version__} speaks {PROTOCOL}",
    ),
    (changed(config={"newer": 1}), (), FleetMismatch, f"does not fit this async_rl {__version__}"),
    (changed(config={"environments": DEEP}), (), FleetMismatch, "values are nested deeper than"),
    (note(), ("--worker.groups_in_fligh", "4"), ConfigError, "groups_in_fligh"),
]


@pytest.mark.parametrize(
    ("found", "words", "error", "sentence"), REFUSED, ids=["none", "torn", "protocol", "unknown", "deep", "own"]
)
def test_what_cannot_be_used_is_refused(found: bytes | None, words: Sequence[str], error: type[AsyncRLError], sentence: str):
    with pytest.raises(error) as refused:
        join(found, *words)
    assert sentence in str(refused.value)
    assert type(refused.value) is error
