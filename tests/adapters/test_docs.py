"""What the pages about adapters show is what the examples are, or works as it stands."""

import re
from typing import Any

import pytest

from async_rl.testing import ScriptedInference
from rollout_workers import agent_of
from tests.adapters.adapter_stage import contexts
from tests.support.repository import ROOT


def block(page: str) -> str:
    found = re.search(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def names_of(page: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "shown"}
    exec(compile(block(page), page, "exec"), names)
    return names


@pytest.mark.parametrize(
    ("page", "example"),
    [("attach_your_agent.md", "openai_sdk/agent.py"), ("adapters/gymnasium.md", "gymnasium/lake.py")],
)
def test_the_code_of_the_page_is_the_example(page: str, example: str):
    docstring, _, code = (ROOT / "examples" / example).read_text().partition("\n\n")
    assert docstring.startswith('"""')
    assert block(page) == code


@pytest.mark.parametrize(
    ("page", "name", "said", "reward"),
    [
        ("adapters/function.md", "add", "5", 1.0),
        ("migrate/trl.md", "environment", "5", 1.1),
        ("migrate/verifiers.md", "ReverseWords", "acba", 1.2),
    ],
)
async def test_the_code_of_the_page_works(page: str, name: str, said: str, reward: float):
    agent = agent_of(names_of(page)[name], name="shown")
    [context] = contexts(1)
    rollout = await agent.rollout(agent.task(0), ScriptedInference(lambda text: said), context)
    assert rollout.reward == pytest.approx(reward)


def test_every_example_has_a_page_and_every_page_an_index():
    pages = {path.name for path in (ROOT / "docs" / "adapters").glob("*.md")}
    text = "".join(
        (ROOT / "docs" / place).read_text() for place in ("attach_your_agent.md", *(f"adapters/{page}" for page in pages))
    )
    text += (ROOT / "docs" / "migrate" / "trl.md").read_text() + (ROOT / "docs" / "engines.md").read_text()
    assert all(page in text for page in pages)
    for example in (path.parent.name for path in (ROOT / "examples").glob("*/run.yaml")):
        assert f"examples/{example}" in text, f"no page names examples/{example}"
