"""The folder of a run as the page opens it: its configuration as far as it can be read, and the runs beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_rl.config.loading import leaves, read_key, resolve, to_show
from async_rl.config.training import METHODS, AnyRun
from async_rl.config.tree import Config
from async_rl.errors import ConfigError
from async_rl.view.changed_keys import changed_keys

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    path: Path
    config: AnyRun | None
    """None if config.yaml is missing or not valid for this version; metrics are shown all the same."""
    problem: str = ""
    """Why there is no configuration."""
    origins: Mapping[str, str] = field(default_factory=dict[str, str])
    """Origin of each value by dotted key."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting by dotted key, without secrets."""
        if self.config is None:
            return {}
        return {".".join(keys): value for keys, value in leaves(to_show(self.config))}

    @property
    def changed(self) -> frozenset[str]:
        """The keys of the settings that are not at their defaults."""
        return changed_keys(self.config) if self.config is not None else frozenset()


def open_folder(path: Path) -> OpenedRun:
    """Open a run by its folder, wherever it was copied to. Raises ConfigError if there is no run in it."""
    if not (path / CONFIG_FILE).exists() and not (path / METRICS_FILE).exists():
        raise ConfigError(f"there is no run in {path}: it has neither {CONFIG_FILE} nor {METRICS_FILE}")
    here = path.resolve()
    words = ["@", str(here / CONFIG_FILE), "--run.folder", str(here.parent), "--run.name", here.name]
    try:
        return open_described(words)
    except ConfigError as error:
        return OpenedRun(path=here, config=None, problem=str(error))


def open_described(words: Sequence[str]) -> OpenedRun:
    """Open the run that a command line describes; nothing is fetched for it. Raises ConfigError."""
    method = read_key("method", words)
    model = next((model for name, model in METHODS.items() if name == method), Config)
    loaded = resolve(model, words, example="runs/NAME/config.yaml")
    if not loaded.config.run.name:
        raise ConfigError("run.name is not set; name the run's folder instead: async-rl view runs/NAME")
    return OpenedRun(path=loaded.config.run_folder, config=loaded.config, origins=loaded.origins)


def runs_beside(folder: Path) -> dict[str, Path]:
    """The runs in the same parent folder, by name."""
    return {path.parent.name: path.parent for path in sorted(folder.parent.glob(f"*/{METRICS_FILE}"))}
