"""An agent of the openai SDK. Its base_url is its only connection to the training."""

from openai import AsyncOpenAI

from rollout_workers import openai_agent


@openai_agent(tasks=[("1+1=", "2"), ("2+3=", "5")], reward=lambda task, answer: float(answer == task.answer))
async def agent(base_url, api_key, task):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        asked = [{"role": "user", "content": task.prompt}]
        said = await client.chat.completions.create(model="policy", messages=asked)
        return said.choices[0].message.content
