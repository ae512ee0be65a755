"""Old names of modules and classes: they work for one release, with a DeprecationWarning that names the new one."""

from __future__ import annotations

import sys
import warnings
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

MODULES: Mapping[str, str] = {
    "async_rl.buffer_config": "async_rl.config.buffer",
    "async_rl.config.supervision": "async_rl.config.run",
    "async_rl.config_files": "async_rl.config.loading",
    "async_rl.config_section": "async_rl.config.section",
    "async_rl.evaluation_config": "async_rl.config.evaluation",
    "async_rl.exposure": "async_rl.config.exposure",
    "async_rl.learner_config": "async_rl.config.learner",
    "async_rl.mix": "async_rl.board.environment_mix",
    "async_rl.references": "async_rl.imports.references",
    "async_rl.rendering": "async_rl.tokenization.rendering",
    "async_rl.rollout_config": "async_rl.config.rollout",
    "async_rl.tables": "async_rl.datasets",
    "async_rl.tokenizer_config": "async_rl.config.tokenizer",
    "async_rl.tokenizers": "async_rl.tokenization.tokenizers",
    "async_rl.training_config": "async_rl.config.training",
    "rollout_workers.adapters.called": "rollout_workers.user_functions",
    "rollout_workers.adapters.optional": "rollout_workers.adapters.import_optional",
    "rollout_workers.adapters.own_thread": "rollout_workers.adapters.episode_thread",
    "rollout_workers.agents.token_row": "rollout_workers.chat.token_row",
    "rollout_workers.checked_rollouts": "rollout_workers.episodes.validation",
    "rollout_workers.either": "rollout_workers.user_functions",
    "rollout_workers.episode": "rollout_workers.episodes.episode",
    "rollout_workers.inference.openai_backend": "rollout_workers.inference.openai.backend",
    "rollout_workers.inference.readable": "rollout_workers.inference.evaluation_inference",
    "rollout_workers.replies": "rollout_workers.chat.replies",
    "rollout_workers.rewards": "rollout_workers.episodes.rewards",
    "rollout_workers.stages": "rollout_workers.episodes.stage_timeouts",
    "rollout_workers.tables": "rollout_workers.datasets",
    "rollout_workers.tasks": "rollout_workers.episodes.task_mix",
    "rollout_workers.tool_calls": "rollout_workers.chat.tool_calls",
}
"""Old and new modules. A package stands for its submodules too."""

NAMES: Mapping[str, Mapping[str, str]] = {
    "async_rl.protocols": {name: name for name in ("ReturnsText", "ReturnsTokens", "ReturnsLogprobs")},
    "async_rl.testing": {"Answer": "AnswerFunction"},
    "rollout_workers.adapters.stepped": {"Step": "WorldStep"},
    "rollout_workers.agents": {"Member": "MultiTaskMember"},
    "rollout_workers.agents.multi_task": {"Member": "MultiTaskMember"},
    "rollout_workers.datasets.curriculum": {"Stage": "CurriculumStage", "Staged": "CurriculumOrder"},
    "rollout_workers.episodes.stage_timeouts": {"OutOfTime": "StageTimeout", "timeouts_in_force": "current_timeouts"},
    "rollout_workers.inference.evaluation_inference": {"Readable": "EvaluationInference", "whole": "with_placeholders"},
    "rollout_workers.user_functions": {"result_of": "awaited", "called": "call_user_function"},
}
"""Renamed names by their module, old and new. A module that still has its old path offers them with `old_names`."""


def old_names(module: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a module whose names in NAMES were renamed."""

    def find(name: str) -> Any:
        new = NAMES[module].get(name)
        if new is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if new in MARKERS:
            _warn(f"{module}.{name}", f"the property `returns` of inference backends (`{MARKERS[new].returns}`)", stacklevel=2)
            return MARKERS[new]
        _warn(f"{module}.{name}", f"{module}.{new}", stacklevel=2)
        return getattr(sys.modules[module], new)

    return find


class OldModules(MetaPathFinder, Loader):
    """Finds the modules of MODULES. It comes after all other finders, so it costs nothing for modules that exist."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        new = new_module(fullname)
        if new is None:
            return None
        _warn(fullname, new, stacklevel=2)
        return ModuleSpec(fullname, self, is_package=hasattr(import_module(new), "__path__"))

    def exec_module(self, module: ModuleType) -> None:
        """Let the module look its names up in the new one."""
        new = import_module(str(new_module(module.__name__)))
        renamed = NAMES.get(new.__name__, {})

        def find(name: str) -> Any:
            return getattr(new, renamed.get(name, name))

        vars(module)["__getattr__"] = find


def new_module(old: str) -> str | None:
    """The new path of a module, or of a submodule of a renamed package."""
    for name in (old, old.rpartition(".")[0]):
        if name in MODULES:
            return MODULES[name] + old.removeprefix(name)
    return None


def install() -> None:
    """Make old module names importable in this process."""
    if not any(isinstance(finder, OldModules) for finder in sys.meta_path):
        sys.meta_path.append(OldModules())


def _warn(old: str, new: str, *, stacklevel: int) -> None:
    warnings.warn(f"{old} is now {new}; the old name goes with the next release", DeprecationWarning, stacklevel=stacklevel + 1)


class _Marker(ABCMeta):
    """`isinstance` for the old marker classes of inference backends, which asks for `returns`."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if cls.__module__ != __name__:
            return super().__instancecheck__(instance)
        levels = ("text", "tokens", "logprobs")
        returns = getattr(instance, "returns", None)
        return returns in levels and levels.index(returns) >= levels.index(cls.returns)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]


class ReturnsText(metaclass=_Marker):
    """Old form of `inference.returns` for backends that return text."""

    returns: ClassVar[str] = "text"


class ReturnsTokens(ReturnsText):
    """Old form of `inference.returns in ("tokens", "logprobs")`."""

    returns = "tokens"


class ReturnsLogprobs(ReturnsTokens):
    """Old form of `inference.returns == "logprobs"`."""

    returns = "logprobs"


MARKERS = {marker.__name__: marker for marker in (ReturnsText, ReturnsTokens, ReturnsLogprobs)}
