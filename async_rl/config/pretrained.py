"""Pretrained models: a Hugging Face folder, or a name on the Hugging Face Hub that is fetched into the local cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError, model_validator

from async_rl.config.hub.datasets import DatasetConfig
from async_rl.config.hub.snapshot import hub_snapshot
from async_rl.config.rollout import EnvironmentConfig
from async_rl.config.section import Section
from async_rl.imports.references import load_reference

_DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt")
"""Configuration and tokenizer. Code and pickled weights of a repository are never fetched."""
_WEIGHTS = ("*.safetensors",)

DATASET_ENVIRONMENTS = ("dataset", "calculator")
"""Built-in environments whose arguments describe a dataset."""

ConfigT = TypeVar("ConfigT", bound=BaseModel)


class Pretrained(Section):
    """A folder, or a model on the Hub."""

    folder: Path | None = None
    """Hugging Face folder. With `name`: where its files are already, so that nothing is fetched."""
    name: str = ""
    """Model on the Hugging Face Hub, for example Qwen/Qwen3-0.6B. Fetched into its cache (HF_HOME), from which it also loads
    without a network."""
    revision: str = ""
    """Branch, tag or commit of `name`. Empty: the newest. A run's config.yaml has the commit."""

    @model_validator(mode="before")
    @classmethod
    def _path_is_a_folder(cls, given: Any) -> Any:
        return {"folder": given} if isinstance(given, str | Path) else given

    @model_validator(mode="after")
    def _revision_belongs_to_a_name(self) -> Pretrained:
        if self.revision and not self.name:
            raise ValueError("revision belongs to a name on the Hub; give name too")
        return self

    @property
    def is_given(self) -> bool:
        return self.folder is not None or bool(self.name)

    @property
    def place(self) -> Path:
        """The folder, in a configuration that was fetched."""
        assert self.folder is not None, f"{self.name} was not fetched"
        return self.folder


class Required(Pretrained):
    """A pretrained model that must be given."""

    @model_validator(mode="after")
    def _is_one(self) -> Required:
        if not self.is_given:
            raise ValueError("give folder, or name for a model on the Hugging Face Hub")
        return self


def fetched(section: ConfigT) -> ConfigT:
    """Fetch all models that a configuration names, and return it with their folders and commits, and with the commits of
    datasets, so that all processes of a run read the same rows. Raises ConfigError."""
    return _changed(section, partial(_fetch, files=(*_DESCRIPTION, *_WEIGHTS)))


def described(section: ConfigT) -> ConfigT:
    """Fetch the configuration and tokenizer of all models that a configuration names, and return it with their folders. Raises
    ConfigError."""
    return _changed(section, partial(_fetch, files=_DESCRIPTION))


def left_to_fetch(section: ConfigT, *, even_given: bool = False) -> ConfigT:
    """Return the configuration for other machines, which fetch there, by name and commit, what `fetched` has put into the Hub's
    cache here. `even_given`: also models whose folder was given beside the name."""
    return _changed(section, partial(_leave_to_fetch, even_given=even_given))


def _changed(section: ConfigT, change: Callable[[BaseModel], Mapping[str, object]]) -> ConfigT:
    """Return the section with the changes of itself and of all sections inside of it."""
    changes, inside = dict[str, object](), partial(_changed, change=change)
    for key in type(section).model_fields:
        before: object = getattr(section, key)
        match before:
            case BaseModel():
                after = inside(before)
            case dict():
                after = {name: inside(each) if isinstance(each, BaseModel) else each for name, each in before.items()}  # pyright: ignore[reportUnknownVariableType]
            case tuple():
                after = tuple(inside(each) if isinstance(each, BaseModel) else each for each in before)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            case _:
                continue
        if after != before:
            changes[key] = after
    changes |= change(section)
    return section.model_copy(update=changes) if changes else section


def _fetch(section: BaseModel, files: tuple[str, ...]) -> Mapping[str, object]:
    match section:
        case Pretrained(name=str(name), folder=None) if name:
            folder = hub_snapshot("model", name, section.revision, files, without=("*/*",))
            return {"folder": folder, "revision": folder.name}
        case DatasetConfig() if files != _DESCRIPTION and section.is_on_hub:
            return {"revision": section.commit()}
        case EnvironmentConfig() if files != _DESCRIPTION:
            args = _with_commits(section.type, section.args)
            return {"args": args} if args != section.args else {}
        case _:
            return {}


def _leave_to_fetch(section: BaseModel, *, even_given: bool) -> Mapping[str, object]:
    match section:
        case Pretrained(name=str(name), folder=Path() as folder) if name:
            is_cached = folder.parts[-3:] == (f"models--{name.replace('/', '--')}", "snapshots", section.revision)
            return {"folder": None} if is_cached or even_given else {}
        case _:
            return {}


def _with_commits(kind: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an environment; those that read a dataset, also inside of `multi_task`, get its commit."""
    if kind == "multi_task" and isinstance(args.get("environments"), list):
        try:
            members = [fetched(EnvironmentConfig.model_validate(each)) for each in args["environments"]]
        except ValidationError:  # refused with its place when the environment is made
            return dict(args)
        return {**args, "environments": [member.model_dump(exclude_unset=True) for member in members]}
    path, revision = args.get("path"), args.get("revision", "")
    if isinstance(path, str) and isinstance(revision, str):
        dataset = DatasetConfig(path=path, revision=revision)
        if dataset.is_on_hub and not dataset.has_commit and reads_dataset(kind):
            return {**args, "revision": dataset.commit()}
    return dict(args)


def reads_dataset(kind: str) -> bool:
    """Whether the arguments of this environment describe a dataset: a built-in one, or a subclass of DatasetAgent, which is
    imported. Raises ConfigError."""
    return kind in DATASET_ENVIRONMENTS or (":" in kind and getattr(load_reference(kind), "reads_dataset", False))
