"""A server of the Model Context Protocol, started and asked by an agent."""

import pytest

from async_rl.testing import ScriptedInference
from tests.adapters.adapter_stage import contexts

pytest.importorskip("mcp", reason="mcp is not installed: make test-adapters")


async def test_the_example_of_mcp_tools_is_played(example):
    async with example("mcp_tools") as stage:
        task, _ = await stage.play()
        call = '<tool_call>{"name": "add", "arguments": {"a": 17, "b": 25}}</tool_call>'
        model = ScriptedInference(
            lambda text: task.answer if "tool: 42" in text else call, tokenizer=stage.engine.tokenizer, context_tokens=2000
        )
        [context] = contexts(1)
        rollout = await stage.agent.rollout(task, model, context)
        assert [message.role for message in rollout.conversation] == ["user", "assistant", "tool", "assistant"]
        assert rollout.reward == 1.0
