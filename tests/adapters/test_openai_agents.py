"""Agents that bring a loop and an SDK of their own, as the examples have them."""

import pytest

REASON = "{} is not installed: make test-adapters"


async def test_the_example_of_the_openai_sdk_is_played(example):
    pytest.importorskip("openai", reason=REASON.format("openai"))
    async with example("openai_sdk") as stage:
        task, rollouts = await stage.play()
        for rollout in rollouts:
            [row] = rollout.samples
            asked, answered = rollout.conversation
            assert (asked.role, asked.content) == ("user", task.prompt)
            assert stage.engine.tokenizer.decode(row.token_ids[row.loss_mask == 1].tolist()).strip() == answered.content.strip()


async def test_the_example_of_openai_agents_is_played(example):
    pytest.importorskip("agents", reason=REASON.format("openai-agents"))
    async with example("openai_agents") as stage:
        _, rollouts = await stage.play()
        for rollout in rollouts:
            assert [message.role for message in rollout.conversation[:2]] == ["system", "user"]
            assert len(rollout.samples) == 1


async def test_the_example_of_langgraph_is_played(example):
    pytest.importorskip("langgraph", reason=REASON.format("langgraph"))
    pytest.importorskip("langchain_openai", reason=REASON.format("langchain-openai"))
    async with example("langgraph") as stage:
        _, rollouts = await stage.play()
        for rollout in rollouts:
            assert rollout.metrics == {"turns": 2, "rows": 1}, "both nodes go on with one conversation"
