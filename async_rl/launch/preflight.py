"""What `config check` asks each role: checks that take seconds and tell what would end a run later."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

from async_rl.config import Config
from async_rl.config.hub.snapshot import NotReachable
from async_rl.config.loading import to_yaml
from async_rl.config.pretrained import described
from async_rl.config.tokenizer import HuggingFaceTokenizer
from async_rl.config.training import AnyRun, TrainingConfig
from async_rl.errors import ConfigError
from async_rl.launch.commands import Role, command, environment
from async_rl.models.from_config import model_shape
from async_rl.models.shape import ModelShape
from async_rl.tokenization.tokenizers import Characters, HuggingFace, has_tokenizer, open_tokenizer

Outcome = Literal["ok", "unchecked", "problem"]
RunT = TypeVar("RunT", bound=Config | TrainingConfig)


class CannotCheck(Exception):
    """This machine lacks what the check needs; the message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    outcome: Outcome
    text: str


def shape_to_check(config: AnyRun) -> ModelShape:
    """The model's shape. Raises CannotCheck if its files are not here, and ConfigError."""
    if config.model.size is None and config.model.folder is None:
        raise CannotCheck(f"the sizes of {config.model.name}, whose files are not here")
    try:
        return model_shape(config.model, tokenizer_to_check(config).vocab_size)
    except CannotCheck:
        if config.model.size is not None:
            raise
        return model_shape(config.model, vocab_size=0)


def tokenizer_to_check(config: AnyRun) -> Characters | HuggingFace:
    """Open the tokenizer. Raises CannotCheck if its files are not here, and ConfigError."""
    match config.tokenizer:
        case HuggingFaceTokenizer(name=str(name), folder=folder) if name and (folder is None or not has_tokenizer(folder)):
            raise CannotCheck(f"the tokenizer of {name}, whose files are not here")
        case _:
            return open_tokenizer(config.tokenizer)


def described_to_check(config: RunT) -> tuple[RunT, list[CheckResult]]:
    """Describe the models of a configuration as far as their names are reachable."""
    try:
        return described(config), []
    except NotReachable as error:
        return config, [CheckResult(outcome="unchecked", text=str(error))]


def checked(checks: Iterable[Callable[[], str]]) -> Iterator[CheckResult]:
    """Call every check: it returns what it found, or raises ConfigError or CannotCheck."""
    for check in checks:
        try:
            yield CheckResult(outcome="ok", text=check())
        except (CannotCheck, NotReachable) as error:
            yield CheckResult(outcome="unchecked", text=str(error))
        except ConfigError as error:
            yield CheckResult(outcome="problem", text=str(error))


def answer(checks: Iterable[Callable[[], str]]) -> None:
    """Print the results, a line of JSON each, for `ask`."""
    for result in checked(checks):
        print(json.dumps(asdict(result)), flush=True)


def ask(commands: Mapping[Role, Sequence[str]], config: AnyRun, inherited: Mapping[str, str]) -> list[CheckResult]:
    """Run the checks of the roles at the same time, each in a process of its own, with these further words."""
    folder = Path(tempfile.mkdtemp())
    try:
        path = folder / "config.yaml"
        path.write_text(to_yaml(config.seen_from_anywhere()))
        given, pipe = environment(config, inherited), subprocess.PIPE
        asked = [
            subprocess.Popen(command(role, ["@", str(path), *words]), env=given, stdout=pipe, stderr=pipe, text=True)
            for role, words in commands.items()
        ]
        found = [result for process in asked for result in _results(process)]
        return list(dict.fromkeys(found))  # what several checks need is wrong once
    finally:
        shutil.rmtree(folder)


def show_results(results: Sequence[CheckResult]) -> None:
    """Print what was found. Raises ConfigError if something is wrong."""
    for outcome, heading in (("ok", "ok"), ("unchecked", "not checked"), ("problem", "wrong")):
        for result in results:
            if result.outcome == outcome:
                for line in result.text.splitlines():
                    print(f"{heading:<11}  {line}")
    if problems := sum(result.outcome == "problem" for result in results):
        raise ConfigError(f"{problems} {'thing is' if problems == 1 else 'things are'} wrong, see above")


def _results(asked: subprocess.Popen[str]) -> list[CheckResult]:
    said, complained = asked.communicate()
    results = [CheckResult(**json.loads(line)) for line in said.splitlines() if line.startswith(_BEGINNING)]
    if asked.returncode:
        last = complained.strip().splitlines()[-1:] or [f"exit code {asked.returncode}"]
        results.append(CheckResult(outcome="problem", text=last[0]))
    return results


_BEGINNING = '{"outcome": '
"""What a line of `answer` begins with; a user's code may print too."""
