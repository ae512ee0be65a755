"""Fetches models and datasets of the Hugging Face Hub into its local cache, from which they also load without a network."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

from async_rl.errors import ConfigError

Kind = Literal["model", "dataset"]

_EXAMPLES: dict[Kind, str] = {"model": "Qwen/Qwen3-0.6B", "dataset": "openai/gsm8k"}


class NotReachable(ConfigError):
    """It is neither in the Hub's cache nor can it be fetched from here."""


@cache
def hub_snapshot(kind: Kind, name: str, revision: str, files: tuple[str, ...], without: tuple[str, ...] = ()) -> Path:
    """Fetch the files whose paths match the patterns `files` and not those of `without`. Returns the folder of the model or
    dataset in the Hub's cache, which is named after its commit. Raises ConfigError."""
    from huggingface_hub import errors, snapshot_download  # pyright: ignore[reportUnknownVariableType]

    what = f"{name} at revision {revision}" if revision else name
    try:
        return Path(
            snapshot_download(
                name, repo_type=kind, revision=revision or None, allow_patterns=list(files), ignore_patterns=list(without)
            )
        )
    except errors.GatedRepoError as error:
        why = f"{name} is gated: accept its conditions on its page of the Hub, then log in with `hf auth login` or set HF_TOKEN"
        raise ConfigError(why) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{name} has no revision {revision!r} on the Hub") from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"the Hub has no {kind} {name}, or it is private: then log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.HFValidationError as error:
        raise ConfigError(f"{name!r} is no name of a {kind} on the Hub, such as {_EXAMPLES[kind]}") from error
    except (errors.HfHubHTTPError, OSError) as error:  # LocalEntryNotFoundError is an OSError
        options = (" --repo-type dataset" if kind == "dataset" else "") + (f" --revision {revision}" if revision else "")
        raise NotReachable(
            f"{what} is not in the Hub's cache and cannot be fetched: run `hf download {name}{options}` where there is a "
            "network and bring the cache (HF_HOME), or name a folder"
        ) from error
