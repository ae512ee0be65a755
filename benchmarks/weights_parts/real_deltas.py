"""Records what reinforcement learning does to bfloat16 weights: trains a small policy and keeps every version.

    python benchmarks/weights_parts/real_deltas.py /tmp/deltas --rates 1e-6 3e-6 --steps 12

The policy first learns fast, so that its weights are no longer what an initialisation drew. Then, from those weights rounded
to bfloat16 as those of a pretrained model are, it learns at each of the rates with a fresh Adam. Our engine generates, our
trainer trains. Every rate leaves `<rate>.npy`: [versions, elements] of uint16.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from async_rl.config import Config
from async_rl.megatron import parallel
from async_rl.megatron.parameters.full_parameters import local_parameters
from async_rl.models.from_config import model_shape
from async_rl.models.shape import ModelShape
from async_rl.tokenization.tokenizers import open_tokenizer
from async_rl.types import Rollout, RolloutGroup, Sample, Status, TakenGroup, Task, spans_of
from learner.batches.batch import pack_batch, shard_from_bytes, shard_to_bytes
from learner.objective import load_objective
from learner.ranks.distributed import init_distributed
from learner.ranks.model_set import build_model_set
from learner.ranks.trainer import RankTrainer
from rollout_workers.inference.engine import MegatronEngine

CPU = torch.device("cpu")
GROUPS, SIBLINGS, PROMPT, ANSWER = 8, 8, 8, 32
WARM_RATE = 1e-3

Images = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    hidden: int = 256
    layers: int = 5
    vocabulary: int = 4096
    rates: tuple[float, ...] = (1e-6, 3e-6)
    warm_steps: int = 25
    steps: int = 12

    def config(self, rate: float) -> Config:
        return Config.model_validate(
            {
                "model": {
                    "size": {"hidden": self.hidden, "layers": self.layers, "heads": self.hidden // 64, "max_positions": 64}
                },
                "environments": [{"type": "even_digits"}],
                "sampling": {"temperature": 1.0, "max_tokens": ANSWER},
                "batch": {"groups_per_step": GROUPS, "group_size": SIBLINGS, "bin_tokens": 1024},
                "learner": {"objective": "grpo", "optimizer": {"learning_rate": rate}},
                "worker": {"kv_cache_gb": 0.25},
                "device": "cpu",
            }
        )

    @property
    def shape(self) -> ModelShape:
        return replace(model_shape(self.config(WARM_RATE).model, 256), vocab_size=self.vocabulary)


class Player:
    """Answers random prompts; an answer is worth the share of its tokens that are even."""

    def __init__(self, engine: MegatronEngine, config: Config, vocabulary: int) -> None:
        self._engine, self._sampling, self._vocabulary = engine, config.sampling.generation_args, vocabulary
        self._rng = np.random.default_rng(7)
        self._version = 0

    async def play(self, weights: Mapping[str, Tensor]) -> list[TakenGroup]:
        self._version += 1
        await self._engine.swap(self._version, weights)
        return list(await asyncio.gather(*(self._group() for _ in range(GROUPS))))

    async def _group(self) -> TakenGroup:
        prompt = self._rng.integers(4, self._vocabulary, PROMPT)
        rollouts = await asyncio.gather(*(self._rollout(prompt) for _ in range(SIBLINGS)))
        group = RolloutGroup(id="g", task=Task(key="t", environment="even", prompt="p"), rollouts=tuple(rollouts), worker="w")
        return TakenGroup(group=group, version_at_commit=self._version, version_at_take=self._version)

    async def _rollout(self, prompt: npt.NDArray[np.int64]) -> Rollout:
        found = await self._engine.generate(prompt.tolist(), self._sampling)
        answered = len(found.token_ids)
        row = Sample(
            token_ids=np.concatenate([prompt, found.token_ids]).astype(np.int32),
            loss_mask=np.repeat(np.array([0, 1], np.uint8), [PROMPT, answered]),
            logprobs=np.concatenate([np.zeros(PROMPT, np.float32), found.logprobs]),
            versions=spans_of([self._version] * answered, PROMPT),
        )
        return Rollout(samples=(row,), reward=float((found.token_ids % 2 == 0).sum()) / ANSWER, status=Status.OK)


class Pupil:
    """A learner of one rank."""

    def __init__(self, config: Config, shape: ModelShape) -> None:
        self._config, self._objective = config, load_objective(config.learner.objective)
        model_set = build_model_set(config, self._objective, shape)
        self._policy = model_set.policy
        self._trainer = RankTrainer(model_set, self._objective, config)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self._policy.load(weights)

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in local_parameters(self._policy.chunks).items()}

    def step(self, groups: list[TakenGroup]) -> float:
        """The mean reward."""
        batch = pack_batch(groups, objective=self._objective, capacity=self._config.batch.bin_tokens)
        result = self._trainer.step(shard_from_bytes(shard_to_bytes(batch, 0)))
        assert not result.skipped
        return float(np.mean([rollout.reward for taken in groups for rollout in taken.group.rollouts]))


def image(weights: Mapping[str, Tensor]) -> Images:
    """What goes over the wire, as one row."""
    flat = torch.cat([tensor.to(torch.bfloat16).reshape(-1) for tensor in weights.values()])
    return flat.view(torch.uint16).numpy()


async def record(plan: Plan, folder: Path) -> dict[float, Path]:
    """Where each rate's images are."""
    config, shape = plan.config(WARM_RATE), plan.shape
    found: dict[float, Path] = {}
    init_distributed(config)
    try:
        engine = MegatronEngine(
            shape, open_tokenizer(config.tokenizer), config.worker, config.sampling.generation_args, device=CPU, seed=7
        )
        async with engine:
            player, pupil = Player(engine, config, plan.vocabulary), Pupil(config, shape)
            for _ in range(plan.warm_steps):
                reward = pupil.step(await player.play(pupil.weights()))
                print(f"warm: mean reward {reward:.3f}", file=sys.stderr)
            start = {name: tensor.to(torch.bfloat16).float() for name, tensor in pupil.weights().items()}
            for rate in plan.rates:
                pupil = Pupil(plan.config(rate), shape)
                pupil.load(start)
                images = [image(pupil.weights())]
                for _ in range(plan.steps):
                    reward = pupil.step(await player.play(pupil.weights()))
                    images.append(image(pupil.weights()))
                    changed = (images[-1] != images[-2]).mean()
                    print(f"{rate:g}: mean reward {reward:.3f}, {100 * changed:.2f} % changed", file=sys.stderr)
                found[rate] = folder / f"{rate:g}.npy"
                np.save(found[rate], np.stack(images))
    finally:
        parallel.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", default=Plan().rates)
    parser.add_argument("--warm-steps", type=int, default=Plan().warm_steps)
    parser.add_argument("--steps", type=int, default=Plan().steps)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    plan = Plan(rates=tuple(args.rates), warm_steps=args.warm_steps, steps=args.steps)
    for rate, path in asyncio.run(record(plan, args.folder)).items():
        print(f"{rate:g} {path}")


if __name__ == "__main__":
    main()
