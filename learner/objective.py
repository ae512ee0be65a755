"""What the learner optimizes: how advantages are made and which loss they enter. A named preset, or a file like one."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

import async_rl
from async_rl.errors import ConfigError
from learner.advantages import AdvantageConfig
from learner.loss_config import PolicyLossConfig


class Objective(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    advantages: AdvantageConfig = AdvantageConfig()
    policy_loss: PolicyLossConfig = PolicyLossConfig()


def load_objective(name_or_path: str) -> Objective:
    """`learner.objective` of the configuration: a preset's name, or a path that ends in .yaml or .yml."""
    path = Path(name_or_path) if name_or_path.endswith((".yaml", ".yml")) else _preset(name_or_path)
    try:
        content: Any = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"learner.objective: cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"learner.objective: {path} is not valid YAML: {error}") from error
    try:
        return _within_reach(path, Objective.model_validate(content if content is not None else {}))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc'])) or 'the file'}: {each['msg']}" for each in error.errors())
        raise ConfigError(f"learner.objective: {path}: {problems}") from error


def _within_reach(path: Path, objective: Objective) -> Objective:
    """The loss can be asked for more than the learner can feed it."""
    loss = objective.policy_loss
    for key, coefficient, missing in (
        ("kl.coefficient", loss.kl.coefficient, "a reference model"),
        ("entropy_coefficient", loss.entropy_coefficient, "the entropy of whole distributions"),
    ):
        if coefficient > 0:
            raise ConfigError(
                f"learner.objective: {path}: policy_loss.{key} needs {missing}, which the learner lacks; set it to 0"
            )
    return objective


def presets_folder() -> Path:
    package = Path(async_rl.__file__).parent
    configs = package / "configs" if (package / "configs").is_dir() else package.parent / "configs"
    return configs / "objectives"


def preset_names() -> list[str]:
    return sorted(path.stem for path in presets_folder().glob("*.yaml"))


def _preset(name: str) -> Path:
    known = preset_names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = (
            f"did you mean {near[0]!r}?"
            if near
            else f"presets are {', '.join(known)}; anything else is the path of a .yaml file"
        )
        raise ConfigError(f"learner.objective: there is no preset {name!r}; {hint}")
    return presets_folder() / f"{name}.yaml"
