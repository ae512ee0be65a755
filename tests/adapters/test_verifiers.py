"""A taskset of verifiers: its own rewards for what our engine says."""

import pytest

from async_rl.config.rollout import EnvironmentConfig
from async_rl.errors import ConfigError
from async_rl.testing import ScriptedInference
from rollout_workers.registry import build_agent
from tests.adapters.adapter_stage import contexts

vf = pytest.importorskip("verifiers.v1", reason="verifiers is not installed: make test-adapters")


async def test_the_example_of_verifiers_is_played(example, monkeypatch):
    monkeypatch.syspath_prepend("examples/verifiers")
    async with example("verifiers") as stage:
        task, rollouts = await stage.play(siblings=3)
        assert [message.role for message in task.prompt] == ["system", "user"]
        for rollout in rollouts:
            assert rollout.conversation[:2] == task.prompt
            parts = rollout.reward_parts
            assert rollout.reward == parts["exact"] + 0.2 * parts["right_length"]
            assert len(rollout.samples) == 1


async def test_its_rewards_are_those_of_the_taskset(example, monkeypatch):
    monkeypatch.syspath_prepend("examples/verifiers")

    def backwards(text: str) -> str:
        return text.rpartition("=")[0][-4:][::-1]

    async with example("verifiers") as stage:
        model = ScriptedInference(backwards, tokenizer=stage.engine.tokenizer)
        [context] = contexts(1, stage.gateway)
        rollout = await stage.agent.rollout(stage.agent.task(0), model, context)
        assert rollout.reward == 1.2
        assert rollout.reward_parts == {"exact": 1.0, "right_length": 1.0}


def test_a_taskset_that_is_not_installed_is_one_sentence():
    with pytest.raises(ConfigError, match="verifiers cannot load 'nowhere'"):
        build_agent(EnvironmentConfig(type="verifiers", args={"taskset": "nowhere"}), seed=3)
