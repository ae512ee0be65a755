"""Pretrained models: a Hugging Face folder, or a name on the Hugging Face Hub that is fetched into the local cache."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, model_validator

from async_rl.config.section import Section
from async_rl.errors import ConfigError

_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""Weights, configuration and tokenizer. Code and pickled weights of a repository are never fetched."""

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
    """Fetch all models that a configuration names, and return it with their folders and commits. Raises ConfigError."""
    changes: dict[str, object] = {}
    for key in type(section).model_fields:
        before: object = getattr(section, key)
        match before:
            case BaseModel():
                after = fetched(before)
            case dict():
                after = {name: fetched(each) if isinstance(each, BaseModel) else each for name, each in before.items()}  # pyright: ignore[reportUnknownVariableType]
            case _:
                continue
        if after != before:
            changes[key] = after
    if isinstance(section, Pretrained) and section.name and section.folder is None:
        folder = _snapshot(section.name, section.revision)
        changes |= {"folder": folder, "revision": folder.name}
    return section.model_copy(update=changes) if changes else section


@cache
def _snapshot(name: str, revision: str) -> Path:
    """Return the folder of a model in the Hub's cache, which is named after its commit."""
    from huggingface_hub import errors, snapshot_download  # pyright: ignore[reportUnknownVariableType]

    what = f"{name} at revision {revision}" if revision else name
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(_FILES), ignore_patterns=["*/*"]))
    except errors.GatedRepoError as error:
        why = f"{name} is gated: accept its conditions on its page of the Hub, then log in with `hf auth login` or set HF_TOKEN"
        raise ConfigError(why) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{name} has no revision {revision!r} on the Hub") from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"the Hub has no model {name}, or it is private: then log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.HFValidationError as error:
        raise ConfigError(f"{name!r} is no name of a model on the Hub, such as Qwen/Qwen3-0.6B") from error
    except (errors.HfHubHTTPError, OSError) as error:  # LocalEntryNotFoundError is an OSError
        fetch = f"hf download {name}" + (f" --revision {revision}" if revision else "")
        raise ConfigError(
            f"{what} is not in the Hub's cache and cannot be fetched: run `{fetch}` where there is a network and bring the "
            "cache (HF_HOME), or name a folder"
        ) from error
