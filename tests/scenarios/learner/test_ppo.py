"""PPO on real models: the gradients of policy and critic are the formulas', ranks agree with one process, and both learn."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from async_rl.megatron.model import build_model, forward_packed, pack
from async_rl.megatron.parameters.full_parameters import bare, load_full
from learner.model import TrainingModel
from learner.ranks.rank_group import RankGroup
from tests.support.full_weights import weights_of, weights_of_model
from tests.support.learner_rank import CPU, VOCABULARY, shape, taken_groups
from tests.support.made_once import made_once
from tests.support.ppo_stage import CRITICS, EVERYTHING, FEW, LAYOUTS, SAVED_AT, STEPS, batch, divided, learner_config, train
from tests.support.warm_processes import play_ranks

# -- the formulas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CRITICS)
def test_the_gradients_are_those_of_the_written_formulas(kind: str) -> None:
    """Sequence by sequence and token by token in float64, without packing, bins or anything of ours but the models."""
    under = learner_config(critic=CRITICS[kind])
    rank_group = RankGroup(under, EVERYTHING, shape(under))
    rank_group.step(batch(2))  # away from the reference
    before = {name: weights_of_model(model) for name, model in rank_group.models.items()}
    result = rank_group.step(batch(1))
    found = {name: gradients(model) for name, model in rank_group.models.items()}
    # not the models that were trained, whose gradients go to their buffers
    models: dict[str, Any] = {}
    for name, model in rank_group.models.items():
        models[name] = build_model(model.shape, device=CPU, dtype=torch.float32, seed=None)
        load_full(models[name], model.shape, before[name])
    policy_loss, value_loss = formulas(models, build_model(shape(under), device=CPU, dtype=torch.float32, seed=0))

    if kind == "own":
        expected = {"policy": (policy_loss, result.loss), "critic": (value_loss, result.metrics["value/loss"])}
    else:
        expected = {"policy": (policy_loss + 0.7 * value_loss, result.loss)}
    for name, (loss, reported) in expected.items():
        assert reported == pytest.approx(loss.item(), abs=1e-5)
        parameters = dict(models[name].named_parameters())
        for (parameter, _), gradient in zip(
            parameters.items(), torch.autograd.grad(loss, list(parameters.values()), retain_graph=True), strict=True
        ):
            torch.testing.assert_close(found[name][parameter], gradient, atol=3e-6, rtol=1e-3, msg=f"{name} {parameter}")
    rank_group.stop()


def gradients(model: TrainingModel) -> dict[str, Tensor]:
    return {name: parameter.main_grad.clone() for name, parameter in bare(model.chunks[0]).named_parameters()}


def formulas(models: dict[str, Any], reference: Any) -> tuple[Tensor, Tensor]:
    """Policy loss and value loss of the groups in batch(1)."""
    gpt, tokens = models["policy"], []
    for taken in taken_groups(1):
        for rollout in taken.group.rollouts:
            [sample] = rollout.samples
            ids = torch.from_numpy(sample.token_ids).long()
            output = forward_packed(gpt, *pack([ids]))
            values = (forward_packed(models["critic"], *pack([ids])) if "critic" in models else output).values()
            log_p = (output.logits()[:, :VOCABULARY].double() / 0.9).log_softmax(-1)
            log_q = (forward_packed(reference, *pack([ids])).logits()[:, :VOCABULARY].double() / 0.9).log_softmax(-1).detach()
            places = [place for place in range(len(ids) - 1) if sample.loss_mask[place + 1]]
            advantage = next_value = 0.0
            for place in reversed(places):
                c, q, b = log_p[place, ids[place + 1]], log_q[place, ids[place + 1]], float(sample.logprobs[place + 1])
                value, reward = values[place].double(), rollout.reward if place == places[-1] else 0.0
                delta = reward - 0.1 * (b - q.item()) + 0.97 * next_value - value.item()
                advantage = delta + 0.97 * 0.9 * advantage
                next_value = value.item()
                entropy = -(log_p[place].exp() * log_p[place]).sum()
                tokens.append((advantage, c, b, q, entropy, value, advantage + next_value))

    raw = np.array([each[0] for each in tokens])
    white = (raw - raw.mean()) / math.sqrt(raw.var(ddof=1) + 1e-8)
    policy, critic = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for A, (_, c, b, q, entropy, value, goal) in zip(white.tolist(), tokens, strict=True):
        ratio, weight = (c - c.detach()).exp(), min(math.exp(c.item() - b), 1.2)
        policy = policy - weight * torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
        policy = policy + 0.3 * (c - q) ** 2 / 2 - 0.05 * entropy
        critic = critic + (value - goal) ** 2 / 2
    return policy / len(tokens), critic / len(tokens)


# -- layouts --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per layout, written by two ranks."""
    return made_once(tmp_path_factory, "ppo_layouts", lambda root: play_ranks("tests.support.ppo_stage", "few", root))


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[list[dict[str, float]], dict[str, Tensor]]]:
    found = {}
    for kind, critic in CRITICS.items():
        under = divided({}, critic)
        rank_group = RankGroup(under, EVERYTHING, shape(under))
        found[kind] = train(rank_group, 1, STEPS), weights_of(rank_group)
        rank_group.stop()
    return found


@pytest.mark.parametrize("layout", FEW)
def test_ranks_agree_with_one_process(by_ranks: Path, alone: Any, layout: str) -> None:
    check_weights(by_ranks, alone, layout)


@pytest.mark.parametrize("layout", FEW)
def test_one_process_resumes_where_ranks_stopped(by_ranks: Path, alone: Any, layout: str) -> None:
    check_resumed(by_ranks, alone, layout)


@pytest.mark.slow
def test_every_layout_agrees_and_is_resumed(tmp_path: Path, alone: Any) -> None:
    play_ranks("tests.support.ppo_stage", "all", tmp_path)
    for layout in LAYOUTS:
        check_weights(tmp_path, alone, layout)
        check_resumed(tmp_path, alone, layout)


def check_weights(by_ranks: Path, alone: Any, layout: str) -> None:
    rows, weights = alone[layout.split("_")[1]]
    agree(json.loads((by_ranks / layout / "rows.json").read_text()), rows)
    found_weights = load_file(by_ranks / layout / "weights.safetensors")
    assert found_weights.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(found_weights[name], tensor, atol=1e-4, rtol=1e-3, msg=name)


def check_resumed(by_ranks: Path, alone: Any, layout: str) -> None:
    """Critic, its moments and its schedule included."""
    kind = layout.split("_")[1]
    under = divided({}, CRITICS[kind])
    rank_group = RankGroup(under, EVERYTHING, shape(under))
    rank_group.load(by_ranks / layout / "checkpoints")
    agree(train(rank_group, SAVED_AT + 1, STEPS), alone[kind][0][SAVED_AT:])
    rank_group.stop()


def agree(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        shared = {name: value for name, value in theirs.items() if not name.startswith("batch/")}
        assert {name: ours[name] for name in shared} == pytest.approx(shared, rel=1e-3, abs=1e-4)


def test_several_updates_move_away_from_the_proximal_policy(alone: Any) -> None:
    """Else the layouts above would agree about less than they claim to."""
    for rows, _ in alone.values():
        assert all(row["policy/kl_proximal"] > 1e-5 for row in rows)
        assert all(row["policy/kl_reference"] > 0 and row["policy/entropy"] > 0 for row in rows[1:])
        assert any(row["value/clip_frac"] > 0 for row in rows)
