"""A plain async function as the agent: it may ask again when the answer was wrong."""

from async_rl import Task
from rollout_workers import Client, function_agent


def sums(index: int) -> tuple[str, str]:
    one, other = index % 5, index // 5 % 5
    return f"{one}+{other}=", str(one + other)


@function_agent(tasks=sums)
async def add(task: Task, client: Client) -> float:
    if await client.ask(task.prompt, max_tokens=1) == task.answer:
        return 1.0
    return 0.5 * (await client.ask("no=", max_tokens=1) == task.answer)
