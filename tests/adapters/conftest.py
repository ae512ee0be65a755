"""The examples, as a person starts them in the repository."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from async_rl.config.loading import load
from tests.adapters.adapter_stage import Stage, open_stage
from tests.support.repository import ROOT


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], AbstractAsyncContextManager[Stage]]:
    """`async with example("gymnasium") as stage`: the run of that folder, with other arguments where a test names some."""
    monkeypatch.chdir(ROOT)

    def opened(name: str, **args: object) -> AbstractAsyncContextManager[Stage]:
        config = load(["@", f"examples/{name}/run.yaml", "--run.name", "tried"])
        first, *others = config.environments
        changed = first.model_copy(update={"args": {**first.args, **args}})
        return open_stage(config.model_copy(update={"environments": (changed, *others)}))

    return opened
