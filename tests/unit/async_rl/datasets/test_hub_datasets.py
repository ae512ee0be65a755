"""Datasets by name: fetched from a Hub once, pinned to a commit, read again without a network."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import ROOT, module_environment
from tests.support.small_hub import COMMIT, GATED, small_hub
from tests.support.waiting import PATIENCE_S
from tests.unit.async_rl.datasets.test_opening import CARD, rows, write

NAME = "tests/sums"
UNREACHABLE = "http://127.0.0.1:9"

OPEN_ALL = """
import json, sys
from async_rl.config.hub.datasets import DatasetConfig
from async_rl.datasets.opening import open_rows
from async_rl.errors import ConfigError

for config in json.loads(sys.argv[1]):
    try:
        print(json.dumps([row["question"] for row in open_rows(DatasetConfig(**config))]))
    except ConfigError as error:
        print(json.dumps(str(error)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {
        "README.md": CARD,
        "main/train-0.parquet": rows(0, 1),
        "main/train-1.jsonl": rows(2),
        "main/test-0.parquet": rows(3),
    }
    return write(tmp_path_factory.mktemp("sums"), files)


def python(code: str, *words: str, home: Path, endpoint: str) -> list[Any]:
    """Run a process for each Hub and cache: the library reads their places when it is imported."""
    environment = module_environment(
        HF_HOME=str(home), HF_ENDPOINT=endpoint, HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HUB_ETAG_TIMEOUT="100"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def open_all(configs: Sequence[Mapping[str, str]], home: Path, endpoint: str) -> list[Any]:
    return python(OPEN_ALL, json.dumps(configs), home=home, endpoint=endpoint)


def test_a_dataset_is_read_by_its_name_and_then_without_a_network(tmp_path: Path, folder: Path):
    wanted = [{"path": NAME, "subset": "main"}, {"path": NAME, "subset": "main", "revision": COMMIT, "split": "train[:2]"}]
    with small_hub({}, {NAME: folder}) as endpoint:
        online = open_all(wanted, tmp_path, endpoint)
    assert online == [["0+1=", "1+1=", "2+1="], ["0+1=", "1+1="]]
    fetched = {path.name for path in (tmp_path / "hub").rglob("snapshots/*/main/*")}
    assert fetched == {"train-0.parquet", "train-1.jsonl"}, "the other split is not needed"
    assert open_all(wanted, tmp_path, UNREACHABLE) == online


def test_a_dataset_without_a_card_is_read_by_the_names_of_its_files(tmp_path: Path):
    plain = write(tmp_path / "plain", {"main/train/0000.jsonl": rows(0), "main/test/0000.jsonl": rows(1), "x/y.jsonl": rows(2)})
    with small_hub({}, {NAME: plain}) as endpoint:
        assert open_all([{"path": NAME, "subset": "main", "split": "test"}], tmp_path / "home", endpoint) == [["1+1="]]


def test_a_name_that_leads_nowhere_is_one_sentence_with_the_way_out(tmp_path: Path, folder: Path):
    wanted = [
        {"path": "tests/unknown"},
        {"path": GATED},
        {"path": NAME, "revision": "old"},
        {"path": "a name"},
        {"path": NAME},
        {"path": NAME, "subset": "main", "split": "dev"},
    ]
    with small_hub({}, {NAME: folder}) as endpoint:
        said = open_all(wanted, tmp_path, endpoint)
    begun = [
        "the Hub has no dataset tests/unknown, or it is private: then log in",
        f"{GATED} is gated: accept its conditions",
        f"{NAME} has no revision 'old' on the Hub",
        "'a name' is no name of a dataset on the Hub, such as openai/gsm8k",
        f"dataset {NAME} has several subsets: set subset to one of main, socratic",
        f"dataset {NAME} has no split 'dev' in subset main; it has train, test",
    ]
    assert [each.startswith(sentence) for each, sentence in zip(said, begun, strict=True)] == [True] * 6, said
    (lost,) = open_all([{"path": NAME, "revision": "v1"}], tmp_path / "empty", UNREACHABLE)
    assert f"{NAME} at revision v1 is not in the Hub's cache" in lost
    assert f"run `hf download {NAME} --repo-type dataset --revision v1` where there is a network" in lost


PINNED = """
import json, sys
from async_rl.cli.train import load_training
from async_rl.config.loading import load

run = load(["@", sys.argv[1]])
print(json.dumps([environment.args for environment in run.environments]))
print(json.dumps(load_training("sft", ["--run.name", "x", "--model.size", "{hidden: 8, layers: 1, heads: 1}",
                                       "--data.path", sys.argv[2]]).data.revision))
"""


def test_a_run_pins_the_commit_so_that_all_its_processes_read_the_same_rows(tmp_path: Path, folder: Path):
    (tmp_path / "mine.py").write_text(
        "from rollout_workers import DatasetAgent\nclass Mine(DatasetAgent): pass\nclass Other: path = ''\n"
    )
    file = tmp_path / "run.yaml"
    file.write_text(f"""
run: {{name: x, folder: {tmp_path}}}
model: {{size: {{hidden: 8, layers: 1, heads: 1}}}}
environments:
  - {{type: dataset, name: sums, args: {{path: {NAME}, subset: main}}}}
  - {{type: "{tmp_path}/mine.py:Mine", args: {{path: {NAME}}}}}
  - {{type: "{tmp_path}/mine.py:Other", args: {{path: {NAME}}}}}
  - type: multi_task
    args: {{environments: [{{type: dataset, args: {{path: {NAME}, revision: main}}}}, {{type: counting, weight: 2}}]}}
""")
    with small_hub({}, {NAME: folder}) as endpoint:
        (one, mine, other, several), data = python(PINNED, str(file), NAME, home=tmp_path / "home", endpoint=endpoint)
    assert one == {"path": NAME, "subset": "main", "revision": COMMIT}
    assert (mine, other) == ({"path": NAME, "revision": COMMIT}, {"path": NAME})
    assert several["environments"] == [
        {"type": "dataset", "args": {"path": NAME, "revision": COMMIT}},
        {"type": "counting", "weight": 2.0},
    ]
    assert data == COMMIT
