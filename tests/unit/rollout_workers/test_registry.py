"""From a `type` to an agent, or to one helpful sentence."""

from pathlib import Path

import pytest

from async_rl.config.rollout import EnvironmentConfig
from async_rl.errors import ConfigError
from async_rl.testing import EchoAgent
from async_rl.types import Scalar
from rollout_workers.environments.even_digits import EvenDigits
from rollout_workers.registry import BUILT_IN, build_agent


def build(type_name: str, **args: Scalar) -> object:
    return build_agent(EnvironmentConfig(type=type_name, args=args), seed=3)


ENVIRONMENTS = [
    name for name, place in BUILT_IN.items() if place.startswith("rollout_workers.environments.") and name != "calculator"
]
"""The others need arguments, or a library."""


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_built_in_can_be_built_by_its_name(name: str):
    agent = build_agent(EnvironmentConfig(type=name), seed=3)
    assert agent.task(0).environment == name


def test_arguments_name_and_seed_arrive():
    section = EnvironmentConfig(type="even_digits", name="warm-up", args={"prompt_digits": 3})
    assert build_agent(section, seed=3) == EvenDigits(name="warm-up", seed=3, prompt_digits=3)


def test_a_class_is_found_in_a_module():
    assert build("async_rl.testing:EchoAgent") == EchoAgent(name="EchoAgent", seed=3)


def test_a_class_is_found_in_a_file(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("from async_rl.testing import EchoAgent\nclass Mine(EchoAgent): pass\n")
    assert type(build(f"{file}:Mine")).__name__ == "Mine"


def test_an_installed_plug_in_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    metadata = tmp_path / "plug_in-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plug-in\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[async_rl.environments]\nparrot = async_rl.testing:EchoAgent\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert build("parrot") == EchoAgent(name="parrot", seed=3)


def test_a_constructor_that_takes_neither_name_nor_seed_gets_neither(tmp_path: Path):
    file = tmp_path / "plain.py"
    file.write_text("from async_rl.testing import EchoAgent\ndef make(): return EchoAgent(name='own')\n")
    assert build(f"{file}:make") == EchoAgent(name="own")


@pytest.mark.parametrize(
    ("type_name", "args", "sentence"),
    [
        ("even_digit", {}, "did you mean 'even_digits'.*known are calculator, counting, dataset, even_digits"),
        (
            "even_digits",
            {"max_token": 3},
            "no argument 'max_token' .did you mean 'max_tokens'..; it takes max_tokens, prompt_digits",
        ),
        ("dataset", {"prompt": "question"}, "^environment 'dataset' .dataset. needs args: path$"),
        ("async_rl.testing:EchoAgnet", {}, "did you mean 'EchoAgent'"),
        ("nowhere.to.be.found:Agent", {}, "module 'nowhere.to.be.found' cannot be imported"),
        ("missing/file.py:Agent", {}, "there is no file missing/file.py"),
        ("tests.support.manual_clock:ManualClock", {}, "has no method task.index."),
        ("rollout_workers.agents:RewardOnlyAgent", {}, "cannot be made: .*abstract"),
    ],
)
def test_mistakes_are_one_sentence(type_name: str, args: dict[str, Scalar], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        build(type_name, **args)


def test_a_file_that_raises_is_named(tmp_path: Path):
    file = tmp_path / "broken.py"
    file.write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=r"broken\.py cannot be loaded \(ZeroDivisionError"):
        build(f"{file}:Agent")
