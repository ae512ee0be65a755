"""What is to be evaluated, from one word of a command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from async_rl.checkpoints.manifest import MANIFEST, Manifest, candidates, found_in, read_asked
from async_rl.config import Config
from async_rl.config.evaluation import OpenAIPolicy, PolicyConfig
from async_rl.errors import ConfigError

LIVE = "live"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """The run as it trains now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSubject:
    path: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceFolder:
    """Of Hugging Face."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySubject:
    name: str
    config: PolicyConfig


Subject = LiveRun | CheckpointSubject | HuggingFaceFolder | PolicySubject


def find_subject(word: str, config: Config) -> Subject:
    """`live`, a url, a name under `policies:`, a checkpoint or Hugging Face folder; nothing is the run's newest checkpoint."""
    if not word:
        return _newest(config)
    if word == LIVE:
        return LiveRun()
    if word.startswith(("http://", "https://")):
        return PolicySubject(name=word.partition("://")[2].strip("/").replace("/", "-"), config=OpenAIPolicy(url=word))
    if word in config.policies:
        return PolicySubject(name=word, config=config.policies[word])
    path = Path(word).absolute()
    if (path / "config.json").is_file():
        return HuggingFaceFolder(path=path)
    if found := found_in(path):
        return _checkpoint(found[0])
    known = ", ".join(config.policies) if config.policies else "none"
    raise ConfigError(
        f"{word!r} is nothing that can be evaluated: no folder {path} with a checkpoint ({MANIFEST}) or a Hugging Face model "
        f"(config.json), and no name under policies ({known}); `live` is the run as it trains now"
    )


def _newest(config: Config) -> CheckpointSubject:
    folder = config.run_folder / "checkpoints"
    found = candidates(folder)
    if not config.run.name or not found:
        where = f"{folder} holds none yet" if config.run.name else "run.name is not set"
        raise ConfigError(
            f"there is no checkpoint to evaluate: {where}; name a checkpoint or a Hugging Face folder, "
            "a url, a policy, or `live`"
        )
    return _checkpoint(found[0])


def _checkpoint(path: Path) -> CheckpointSubject:
    return CheckpointSubject(path=path, manifest=read_asked(path))
