"""Find what to evaluate from the argument of `async-rl eval`."""

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
    """The run with its current weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSubject:
    """A checkpoint of the run."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceFolder:
    """A folder in the format of Hugging Face."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySubject:
    """A model under `policies`, or a served one."""

    name: str
    config: PolicyConfig


Subject = LiveRun | CheckpointSubject | HuggingFaceFolder | PolicySubject


def find_subject(word: str, config: Config) -> Subject:
    """Interpret `live`, a url, a name under `policies:`, or a checkpoint or Hugging Face folder; empty means the newest
    checkpoint. Raises ConfigError.
    """
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
        f"cannot evaluate {word!r}: no folder {path} with a checkpoint ({MANIFEST}) or a Hugging Face model "
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
