"""Reward functions as they stand in a script for TRL's GRPOTrainer, and the line that makes an environment of them."""

from rollout_workers import trl_rewards

rows = [{"prompt": f"{one}+{other}=", "solution": str(one + other)} for one in range(5) for other in range(5)]


def correct(completions, solution, **columns):
    return [float(completion.startswith(right)) for completion, right in zip(completions, solution, strict=True)]


async def concise(completions, **columns):
    return [1 / max(1, len(completion)) for completion in completions]


environment = trl_rewards(correct, concise, dataset=rows, weights=[1.0, 0.1])
