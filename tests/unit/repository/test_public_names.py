"""What people import: public names on first use, old names for one release, decorated functions, environments alone."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import async_rl
import rollout_workers
from async_rl import EpisodeContext, InferenceInterface, Rollout, Status, Task, Ticket, Turn
from async_rl.config.rollout import EnvironmentConfig
from async_rl.errors import ConfigError
from async_rl.imports.lazy import modules_of
from async_rl.imports.old_names import MODULES, NAMES, install
from async_rl.testing import ScriptedInference
from rollout_workers import Client, Environment, agent_of, function_agent
from rollout_workers.registry import build_agent
from tests.support.waiting import PATIENCE_S

CONTEXT = EpisodeContext(ticket=Ticket(id="t", task_index=0, version=0, attempt=1), sibling=0, seed=0)


@pytest.mark.parametrize("package", [async_rl, rollout_workers])
def test_every_name_of_a_stub_can_be_imported(package):
    assert package.__file__ is not None
    for name, module in modules_of(Path(package.__file__).with_suffix(".pyi")).items():
        assert getattr(package, name) is getattr(importlib.import_module(module), name)
        assert name in dir(package)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        package.Nothing  # noqa: B018


def test_importing_the_packages_and_their_base_classes_imports_no_torch():
    script = "import sys, async_rl; from rollout_workers import Environment, function_agent; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("package", ["learner.losses", "learner.advantages", "learner.packing"])
def test_the_formulas_are_imported_from_their_package(package: str):
    found = importlib.import_module(package)
    assert {"policy_loss", "group_advantages", "plan"} & set(found.__all__)
    assert all(hasattr(found, name) for name in found.__all__)


# -- old names -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("old", MODULES)
def test_an_old_module_is_the_new_one(old: str, monkeypatch: pytest.MonkeyPatch):
    install()
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {MODULES[old]}; "):
        found = importlib.import_module(old)
    new = importlib.import_module(MODULES[old])
    assert found.__doc__ is None or found is not new
    for name in [name for name in vars(new) if name[0].isupper()][:3]:
        assert getattr(found, name) is getattr(new, name)


def test_an_old_module_of_a_package_and_an_old_class_are_the_new_ones(monkeypatch: pytest.MonkeyPatch):
    from rollout_workers.datasets.curriculum import CurriculumStage

    for module in ("rollout_workers.tables", "rollout_workers.tables.curriculum"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.warns(DeprecationWarning, match="rollout_workers.tables"):
        from rollout_workers.tables.curriculum import Stage  # pyright: ignore[reportMissingImports]
    assert Stage is CurriculumStage
    with pytest.raises(ModuleNotFoundError), pytest.warns(DeprecationWarning, match="nothing"):
        importlib.import_module("rollout_workers.tables.nothing")


@pytest.mark.parametrize("module", [module for module in NAMES if module != "async_rl.protocols"])
def test_an_old_name_is_the_new_one(module: str):
    found = importlib.import_module(module)
    if not hasattr(found, "__getattr__"):
        pytest.skip("only its old module path has the old names")
    for old, new in NAMES[module].items():
        with pytest.warns(DeprecationWarning, match=f"{module}.{old} is now {module}.{new}; "):
            assert getattr(found, old) is getattr(found, new)


def test_the_old_markers_of_backends_follow_what_they_return():
    with pytest.warns(DeprecationWarning, match="the property `returns`"):
        from async_rl.protocols import ReturnsLogprobs, ReturnsTokens
    backend = ScriptedInference(lambda text: text)
    assert isinstance(backend, ReturnsLogprobs)
    backend.returns = "tokens"
    assert isinstance(backend, ReturnsTokens)
    assert not isinstance(backend, ReturnsLogprobs)

    class Marked(ScriptedInference, ReturnsTokens):
        pass

    assert isinstance(Marked(lambda text: text), Marked)
    assert not isinstance(backend, Marked)


# -- decorators ------------------------------------------------------------------------------------------------------
@function_agent(tasks=["3="])
async def asks_once(task: Task, client: Client) -> float:
    return float(await client.ask(task.prompt) == "4")


async def test_a_decorated_function_stays_itself_and_has_an_agent():
    assert asks_once.__name__ == "asks_once"

    class Always:
        async def ask(self, prompt: str) -> str:
            return "4"

    assert await asks_once(Task(key="k", environment="e", prompt="3="), Always()) == 1.0  # pyright: ignore[reportArgumentType]
    agent = agent_of(asks_once, name="once")
    rollout = await agent.rollout(agent.task(0), ScriptedInference(lambda text: "4"), CONTEXT)
    assert (rollout.reward, rollout.status) == (1.0, Status.OK)


# -- environments alone ----------------------------------------------------------------------------------------------
class Doubling(Environment):
    """Two turns at most: a second try after a wrong answer."""

    max_turns = 2
    num_tasks = 5

    def task(self, index: int) -> Task:
        return self.new_task(index, f"{index}*2=", answer=str(2 * index))

    def get_observation(self, task: Task, turns: list[Turn]) -> str | None:
        return None if turns[-1].text == task.answer else "no="

    async def reward(self, task: Task, response: str) -> float:
        return float(response == task.answer)


async def test_an_environment_without_an_agent_is_played():
    answers = iter(["5", "6"])
    agent = agent_of(Doubling, name="doubling")
    assert agent.num_tasks == 5  # pyright: ignore[reportAttributeAccessIssue]
    rollout = await agent.rollout(agent.task(3), ScriptedInference(lambda text: next(answers)), CONTEXT)
    assert (rollout.reward, rollout.metrics["turns"]) == (1.0, 2)


FILE = """
from async_rl import Task

class Plain:
    opened = False

    def task(self, index):
        return Task(key=str(index), environment="plain", prompt="3=")

    async def __aenter__(self):
        self.opened = True

    async def __aexit__(self, *problem):
        self.opened = False

class Scored(Plain):
    def reward(self, task, response):
        return float(self.opened and response == "4")

class Both(Scored):
    async def rollout(self, task, inference, context):
        raise NotImplementedError
"""


async def test_any_class_with_task_and_reward_is_an_environment(tmp_path: Path):
    (tmp_path / "mine.py").write_text(FILE)

    def build(name: str):
        return build_agent(EnvironmentConfig(type=f"{tmp_path}/mine.py:{name}"), seed=0)

    agent = build("Scored")
    async with agent:  # pyright: ignore[reportGeneralTypeIssues]
        rollout: Rollout = await agent.rollout(agent.task(0), inference(), CONTEXT)
    assert rollout.reward == 1.0
    assert type(build("Both")).__name__ == "Both"
    with pytest.raises(ConfigError, match=r"'Plain' .*has neither reward\(task, response\).* nor rollout\(task, inference, "):
        build("Plain")


def inference() -> InferenceInterface:
    return ScriptedInference(lambda text: "4")
