"""`async-rl env check` plays an environment and finds what is wrong with it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.repository import ROOT
from tests.support.run_processes import finished, stood_still

BAD = ROOT / "tests" / "support" / "bad_environments.py"
NAMES = (
    *(
        "Fine",
        "Connects",
        "RemembersWhatItDrew",
        "HashesText",
        "PaysEverybody",
        "PaysInfinity",
        "Raises",
        "Cannot",
        "HasNoAnswer",
        "Talks",
        "Speaks",
    ),
    *("Blocks", "LeavesThings", "Repeats"),
)
CONFIG = {
    "model": {"size": {"hidden": 16, "layers": 1, "heads": 2}},
    "tokenizer": {"type": "characters", "alphabet": "0123456789=-"},
    "environments": [{"type": f"{BAD}:{name}"} for name in NAMES],
    "sampling": {"max_tokens": 16},
}


def check(folder: Path, *words: str, warm: bool = True) -> subprocess.CompletedProcess[str]:
    return finished(folder, "env", "check", *words, warm=warm)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("check") / "bad.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


@pytest.fixture(scope="module")
def found(config: Path) -> dict[str, dict[str, Any]]:
    """What is said of each environment of a configuration."""
    # Executed: processes forked from one have the same hashes of text.
    done = check(config.parent, "@", str(config), "--episodes", "2", "--json", warm=False)
    assert done.returncode == 2, done.stderr
    assert all(name in done.stderr for name in ("RemembersWhatItDrew", "HashesText"))
    assert "things are wrong, see above" in done.stderr
    environments = {each["name"]: each for each in json.loads(done.stdout)["environments"]}
    for each in environments.values():
        if each["name"] != "Blocks":  # what `stood_still` says
            each["problems"] = [problem for problem in each["problems"] if "blocks the event loop" not in problem]
    return environments


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("RemembersWhatItDrew", "task(0) is a different task the second time: `task` must be pure"),
        ("HashesText", "task(0) is a different task in another process"),
        ("PaysEverybody", "all answers are worth 1, right, wrong and nothing alike"),
        ("PaysInfinity", "an episode fails (reward): ValueError: the reward must be a finite number, got inf"),
        ("Raises", "an episode fails (environment): LookupError: no such room"),
        ("Cannot", "a task cannot be posed: IndexError: the data set is empty"),
        ("HasNoAnswer", "a task cannot be posed: InvalidResult: a Task's answer must be text, got None"),
        ("Talks", "a prompt has 601 tokens, and a sequence at most 512"),
        ("Speaks", "the prompts hold characters that tokenizer.alphabet lacks: ' ?W"),
        ("Blocks", "s at bad_environments.py:"),
        ("LeavesThings", "it leaks the task _never"),
        ("LeavesThings", "time.sleep(600))"),
    ],
)
def test_a_mistake_is_found_and_named(found: dict[str, dict[str, Any]], name: str, sentence: str):
    assert any(sentence in problem for problem in found[name]["problems"]), found[name]["problems"]


def test_one_mistake_is_one_problem(found: dict[str, dict[str, Any]]):
    assert found["Fine"]["problems"] == found["Connects"]["problems"] == found["Repeats"]["problems"] == []
    assert found["Repeats"]["notes"] == ["the first 2 tasks are all the same"]
    for name in ("HashesText", "PaysEverybody", "PaysInfinity", "Cannot", "Speaks"):
        assert len({problem.partition("(")[0] for problem in found[name]["problems"]}) == 1, found[name]["problems"]


def test_episodes_are_shown_with_their_rewards(found: dict[str, dict[str, Any]]):
    rewards = [(episode["answer"], episode["reward"]) for episode in found["Fine"]["episodes"]]
    assert rewards == [("right", 1), ("wrong", 0), ("nothing", 0)] * 2
    assert found["Raises"]["episodes"][0]["reward"] is None


def test_a_person_reads_the_conversation_and_the_tokens(tmp_path: Path):
    script = tmp_path / "said.txt"
    script.write_text("5\n8\n")
    done = check(tmp_path, "guess_number", "--episodes", "1", "--args", '{"highest": 9}', "--script", str(script))
    assert "guess_number/0/0, answered by the script: ok, reward 0.75" in done.stdout
    assert "higher=" in done.stdout
    assert "tokens sampled of" in done.stdout
    if not stood_still(done):
        assert done.returncode == 0, done.stderr
        assert "fine   1 episodes of 1 tasks" in done.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("cuonting",), "did you mean 'counting'?"),
        (("counting", "--args", "{"), "--args must be a JSON object"),
        (("counting", "--model", "nowhere"), "cannot evaluate 'nowhere'"),
    ],
)
def test_a_mistake_in_the_line_is_one_sentence(tmp_path: Path, words: tuple[str, ...], sentence: str):
    done = check(tmp_path, *words)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("NeverReturns", "environment 'NeverReturns' has blocked the event loop for 5 s, at FILE:LINE in reward; waiting"),
        ("NeverPoses", "environment 'NeverPoses': task of NeverPoses has not returned for 5 s, it is at FILE:LINE in task"),
    ],
)
def test_code_that_never_ends_is_named_while_it_runs(tmp_path: Path, name: str, sentence: str):
    line = [sys.executable, "-P", "-c", "from async_rl.cli.main import main; main()", "env", "check", f"{BAD}:{name}"]
    with subprocess.Popen(line, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        told = process.stderr.readline()
        process.kill()
    said = re.escape(f"async-rl env check: {sentence}").replace("FILE:LINE", f"{re.escape(str(BAD))}:[0-9]+")
    assert re.fullmatch(said.replace(r"for\ 5\ s", "for [0-9]+ s") + ".*\n", told), told
