"""`worker.backend` names an engine, or is refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from async_rl.cli.main import dispatch
from async_rl.config.rollout import WorkerConfig
from async_rl.errors import ConfigError
from async_rl.models.from_config import model_shape
from async_rl.tokenization.tokenizers import open_tokenizer
from rollout_workers.inference.open_engine import open_engine
from rollout_workers.inference.rollout_engine import EngineSetup, RolloutEngine
from rollout_workers.inference.scripted import Scripted
from tests.support.repository import ROOT
from tests.support.run_processes import read_config, write_config


class TextOnly(Scripted):
    """All that an engine needs, without log-probabilities."""

    returns = "text"
    version = device = metrics = swap = watch = __aenter__ = __aexit__ = None

    def __init__(self, setup: EngineSetup) -> None:
        self.tokenizer = setup.tokenizer


def opened(folder: Path, backend: str) -> RolloutEngine:
    config = read_config(write_config(folder, "run", worker={"backend": backend}))
    tokenizer = open_tokenizer(config.tokenizer)
    shape = model_shape(config.model, tokenizer.vocab_size)
    return open_engine(config, shape, tokenizer, seed=3, inherited={})


async def test_an_engine_of_ones_own_is_given_what_it_is_made_from(tmp_path: Path) -> None:
    engine = opened(tmp_path, f"{ROOT}/examples/own_engine/engine.py:PlainEngine")
    assert (type(engine).__name__, engine.version, str(engine.device)) == ("PlainEngine", -1, "cpu")
    assert engine.tokenizer.encode("3=") == open_tokenizer(read_config(tmp_path / "run.yaml").tokenizer).encode("3=")


@pytest.mark.parametrize(
    ("backend", "sentence"),
    [
        (f"{ROOT}/examples/own_engine/engine.py:PlainEngines", r"has no 'PlainEngines' \(did you mean 'PlainEngine'\?\)"),
        ("no_such_module:Engine", "worker.backend: module 'no_such_module' cannot be imported"),
        ("builtins:dict", "^worker.backend: builtins:dict cannot be made: "),
        ("builtins:repr", "which lacks tokenizer, generate, version, device, metrics, swap, watch, __aenter__, __aexit__"),
        (f"{__name__}:TextOnly", "TextOnly has returns = 'text'; rollouts are trained on"),
    ],
)
def test_what_is_no_engine_is_refused(tmp_path: Path, backend: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        opened(tmp_path, backend)


@pytest.mark.parametrize(
    ("worker", "sentence"),
    [
        ({"backend": "hff"}, r"'hff' is no inference engine \(did you mean 'hf'\?\); there are megatron and hf, and your own"),
        (
            {"backend": "hf", "tensor": 2},
            r"backend hf is one engine on one device, so engines \(1\) and tensor \(2\)",
        ),
        ({"backend": "hf", "cuda_graphs": "always"}, "cuda_graphs: always needs backend megatron"),
        ({"backend": "hf", "async_scheduling": True}, "async_scheduling needs backend megatron and tensor 1"),
        ({"tensor": 2, "async_scheduling": True}, "async_scheduling needs backend megatron and tensor 1"),
    ],
)
def test_a_configuration_says_so_first(tmp_path: Path, worker: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        WorkerConfig.model_validate(worker)
    path = write_config(tmp_path, "wrong", worker=worker)
    for verb in ("check", "show"):
        with pytest.raises(ConfigError, match=rf"worker.*{sentence}"):
            dispatch(["config", verb, "@", str(path)])


def test_a_file_is_found_from_any_folder(tmp_path: Path) -> None:
    config = read_config(write_config(tmp_path, "run", worker={"backend": "engines/mine.py:Engine"}))
    assert config.seen_from_anywhere().worker.backend == f"{Path.cwd()}/engines/mine.py:Engine"
