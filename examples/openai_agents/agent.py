"""An agent of openai-agents with a tool."""

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

from rollout_workers import openai_agent

set_tracing_disabled(True)  # it would send every episode to OpenAI


@function_tool
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


@openai_agent(tasks=[("What is 17 + 25?", "42")], reward=lambda task, answer: float(task.answer in answer))
async def agent(base_url, api_key, task):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        # The Responses API works too, but there the SDK raises when an answer runs into max_tokens, and the episode fails.
        model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
        calculator = Agent(name="calculator", instructions="Use your tool.", tools=[add], model=model)
        result = await Runner.run(calculator, task.prompt, max_turns=4)
        return str(result.final_output)
