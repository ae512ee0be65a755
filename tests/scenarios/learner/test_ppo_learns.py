"""What a critic, a reference and a teacher are for: each of them on a small task, from sampled tokens to new weights."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.megatron import parallel
from async_rl.megatron.huggingface.export import FolderExtras, write_folder
from async_rl.megatron.model import build_model
from async_rl.models.hf_config import written_config
from learner.batches.batch import pack_batch
from learner.objective import Objective, load_objective
from learner.ranks.model_set import build_model_set, check_model_set
from learner.ranks.rank_group import RankGroup
from learner.step import StepResult
from tests.scenarios.learner.bandits import Bandits, share_right
from tests.support.full_parameters import gather_full
from tests.support.full_weights import weights_of, weights_of_model
from tests.support.learner_rank import CPU, shape
from tests.support.ppo_stage import CRITICS, EVERYTHING, OPTIMIZER, OWN, SHARED, batch, learner_config


@contextmanager
def rank_group(under: Config, objective: Objective) -> Iterator[RankGroup]:
    made = RankGroup(under, objective, shape(under))
    try:
        yield made
    finally:
        made.stop()


def play(
    learner: RankGroup, under: Config, objective: Objective, steps: int, *, groups_per_step: int = 8
) -> tuple[list[StepResult], list[float]]:
    """What each step reported, and how well its rollouts did."""
    bandits, results, shares = Bandits(shape(under)), [], []
    for _ in range(steps):
        groups = bandits.groups(learner, groups=groups_per_step)
        shares.append(share_right(groups))
        results.append(learner.step(pack_batch(groups, objective=objective, capacity=200)))
    return results, shares


@pytest.mark.parametrize("kind", ["own", pytest.param("shared", marks=pytest.mark.slow)])
def test_policy_and_critic_learn(kind: str) -> None:
    under, objective = learner_config(critic=CRITICS[kind], updates=(1, 2)), load_objective("ppo")
    with rank_group(under, objective) as learner:
        results, shares = play(learner, under, objective, steps=26)
    first, last = results[0].metrics, results[-1].metrics
    assert shares[0] < 0.6
    assert shares[-1] > 0.9
    assert last["value/loss"] < first["value/loss"] / 10
    assert first["value/explained_variance"] < 0.3
    assert last["value/explained_variance"] > 0.8
    assert last["value/mean"] == pytest.approx(last["value/return_mean"], abs=0.3)


def test_what_is_pushed_gives_logits_only() -> None:
    under = learner_config(critic=SHARED)
    with rank_group(under, EVERYTHING) as learner:
        assert {"value_head.weight", "value_head.bias"} == weights_of_model(learner.model).keys() - {
            box.name for box in learner.model.held()
        }


def test_a_critic_warms_up_alone() -> None:
    under = learner_config(critic=OWN | {"warmup_steps": 2}, updates=(2, 1), steps=3, optimizer=OPTIMIZER | {"decay": "linear"})
    with rank_group(under, EVERYTHING) as learner:
        initial, is_still, rates = weights_of(learner), [], []
        for step in (1, 1, 1):
            result = learner.step(batch(step, minibatches=2))
            is_still.append(all(torch.equal(tensor, initial[name]) for name, tensor in weights_of(learner).items()))
            rates.append(result.learning_rate)
            assert result.metrics["value/grad_norm"] > 0
            assert result.metrics["policy/tokens"] > 0
    assert is_still == [True, True, False]
    assert rates == pytest.approx([0.0, 0.0, 0.005])  # half of the policy's own two updates, not of six


def test_preferences_teach() -> None:
    objective, under = load_objective("online_dpo"), learner_config()
    with rank_group(under, objective) as learner:
        results, shares = play(learner, under, objective, steps=30)
    assert 0 < results[0].metrics["policy/tokens"] <= 8 * 2 * 3, "at most a pair of each group"
    assert shares[0] < 0.6
    assert sum(shares[-3:]) / 3 > 0.75


@pytest.mark.parametrize("where", [pytest.param("loss", marks=pytest.mark.slow), "reward"])
def test_a_reference_keeps_the_policy_near(where: str) -> None:
    ends = {}
    for beta in (1e-6, 1.0):
        loss: dict[str, Any] = {"surrogate": "ppo_clip", "kl": {"estimator": "k2", "coefficient": 1e-6}}
        kl_in_reward = beta if where == "reward" else 0.0
        if where == "loss":
            loss["kl"]["coefficient"] = beta
        objective = Objective.model_validate(
            {"advantages": {"type": "returns", "whiten": False}, "policy_loss": loss, "kl_in_reward": kl_in_reward}
        )
        under = learner_config(updates=(1, 2))
        with rank_group(under, objective) as learner:
            results, _ = play(learner, under, objective, steps=12)
        ends[beta] = results[-1].metrics["policy/kl_reference"]
    assert ends[1.0] < ends[1e-6] / 4


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Who has opinions: larger weights than those that training begins with."""
    parallel.initialize(device=CPU)
    under = learner_config()
    folder, opinionated = tmp_path_factory.mktemp("teacher") / "model", shape(under)
    model = build_model(opinionated, device=CPU, dtype=torch.float32, seed=7)
    weights = {
        name: tensor * (1 if tensor.ndim == 1 else 6) for name, tensor in (gather_full(model, opinionated) or {}).items()
    }
    write_folder(folder, opinionated, weights, dtype=torch.float32, shard_bytes=10**9, extras=FolderExtras())
    return folder


def test_a_student_comes_to_resemble_its_teacher(teacher: Path) -> None:
    """Without any reward: the advantages' mean is minus the divergence."""
    under = learner_config(teacher={"folder": teacher}, reference={"folder": teacher})
    objective = Objective.model_validate(
        {"advantages": "distillation", "policy_loss": {"surrogate": "cispo", "kl": {"estimator": "k3", "coefficient": 1e-6}}}
    )
    with rank_group(under, objective) as learner:
        results, _ = play(learner, under, objective, steps=30, groups_per_step=32)
    divergence = [each.metrics["policy/kl_reference"] for each in results]
    assert divergence[-1] < divergence[0] / 3


@pytest.mark.parametrize("kind", CRITICS)
def test_all_begin_from_the_policys_folder(teacher: Path, kind: str) -> None:
    tree = learner_config(critic=CRITICS[kind]).model_dump()
    under = Config.model_validate(tree | {"model": {"folder": teacher}})
    with rank_group(under, EVERYTHING) as learner:
        policy = weights_of(learner)
        critic = weights_of_model(learner.models["critic"] if kind == "own" else learner.model)
        result = learner.step(batch(1))
    assert critic["value_head.weight"].abs().sum() > 0
    assert all(torch.equal(tensor, critic[name]) for name, tensor in policy.items() if name in critic)
    assert len(policy.keys() & critic.keys()) > 10
    assert result.metrics["policy/kl_reference"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("kind", CRITICS)
def test_nothing_to_train_on_is_a_step_without_gradient(kind: str) -> None:
    under = learner_config(critic=CRITICS[kind])
    with rank_group(under, EVERYTHING) as learner:
        result = learner.step(pack_batch([], objective=EVERYTHING, capacity=40))
    assert (result.loss, result.grad_norm, result.skipped, result.metrics["value/loss"]) == (0, 0, False, 0)


@pytest.mark.parametrize("kind", CRITICS)
def test_a_resumed_run_equals_an_uninterrupted_one(kind: str, tmp_path: Path) -> None:
    under = learner_config(critic=CRITICS[kind], updates=(2, 2))
    with rank_group(under, EVERYTHING) as learner:
        learner.step(batch(1, minibatches=2))
        learner.save(tmp_path, step=1, extra={}, keep=1).result()
        expected = [learner.step(batch(step, minibatches=2)) for step in (2, 3)]
        weights = weights_of(learner)
    with rank_group(under, EVERYTHING) as successor:
        assert successor.load(tmp_path) is not None
        assert [successor.step(batch(step, minibatches=2)) for step in (2, 3)] == expected
        assert all(torch.equal(tensor, weights[name]) for name, tensor in weights_of(successor).items())


def test_entropy_is_measured_where_it_is_asked_for() -> None:
    """And its measurement changes nothing."""
    made: list[tuple[StepResult, dict[str, Tensor]]] = []
    for measure in (False, True):
        under, objective = learner_config(measure_entropy=measure), load_objective("grpo")
        with rank_group(under, objective) as learner:
            made.append((learner.step(batch(1, objective=objective)), weights_of(learner)))
    (without, plain), (measured, same) = made
    assert "policy/entropy" not in without.metrics
    assert measured.metrics["policy/entropy"] == pytest.approx(3.0, abs=0.1)  # log 21
    assert without.loss == measured.loss
    assert all(torch.equal(same[name], tensor) for name, tensor in plain.items())


@pytest.mark.parametrize(
    ("objective", "learner", "said"),
    [
        (
            "ppo",
            {},
            r"learner\.objective: ppo needs a critic; describe it as learner\.critic: \{type: own\} or \{type: shared\}",
        ),
        ("grpo", {"critic": OWN}, r"learner\.critic: objective grpo does not use a critic; remove the section"),
        (
            "on_policy_distill",
            {},
            r"learner\.objective: on_policy_distill needs a teacher; describe it as learner\.teacher: \{folder: PATH\}",
        ),
    ],
)
def test_a_missing_or_unused_model_is_refused(objective: str, learner: dict[str, Any], said: str) -> None:
    under = learner_config(objective=objective, **learner)
    with pytest.raises(ConfigError, match=said):
        check_model_set(under, load_objective(objective), shape(under))


def test_what_is_wrong_with_a_folder_is_said_of_the_setting_that_names_it(tmp_path: Path) -> None:
    """Its weights are looked at after its measurements, when the models are built."""
    teacher, objective = tmp_path / "nowhere", load_objective("on_policy_distill")
    under = learner_config(teacher={"folder": teacher}, objective="on_policy_distill")
    with pytest.raises(ConfigError, match=r"^learner\.teacher\.folder: cannot read"):
        check_model_set(under, objective, shape(under))
    teacher.mkdir()
    (teacher / "config.json").write_text(json.dumps(written_config(shape(under), dtype="float32")))
    parallel.initialize(device=CPU)
    with pytest.raises(ConfigError, match=r"^learner\.teacher\.folder: cannot read .*model\.safetensors"):
        build_model_set(under, objective, shape(under))
    parallel.shutdown()


def test_a_teacher_of_other_tokens_is_refused(teacher: Path) -> None:
    under = learner_config(teacher={"folder": teacher}, objective="on_policy_distill")
    with pytest.raises(
        ConfigError, match=r"learner\.teacher\.folder: the vocabulary of .* has 21 tokens and that of the model 22"
    ):
        check_model_set(under, load_objective("on_policy_distill"), replace(shape(under), vocab_size=22))


def test_equal_rewards_must_not_be_dropped_where_they_teach() -> None:
    under = learner_config(critic=OWN, objective="ppo")
    dropping = Config.model_validate(under.model_dump() | {"batch": under.batch.model_dump() | {"drop_no_signal": True}})
    with pytest.raises(ConfigError, match=r"batch\.drop_no_signal: objective ppo learns from siblings with equal rewards too"):
        check_model_set(dropping, load_objective("ppo"), shape(under))


def test_an_unused_reference_is_refused(teacher: Path) -> None:
    under = learner_config(reference={"folder": teacher}, objective="grpo")
    with pytest.raises(ConfigError, match=r"learner\.reference: objective grpo does not use a reference; remove the section"):
        check_model_set(under, load_objective("grpo"), shape(under))


def test_siblings_are_compared_only_where_there_are_some() -> None:
    alone = learner_config(group_size=1, objective="grpo")
    with pytest.raises(ConfigError, match=r"batch\.group_size: objective grpo compares siblings"):
        check_model_set(alone, load_objective("grpo"), shape(alone))
    check_model_set(alone, load_objective("reinforce_pp"), shape(alone))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_critics_optimizer_has_nowhere_to_move_its_moments_from_without_a_gpu() -> None:
    under = learner_config(critic={"type": "own", "optimizer": {"offload": True}}, objective="ppo")
    with pytest.raises(ConfigError, match=r"learner\.critic\.optimizer\.offload .* set it to false without a GPU"):
        build_model_set(under, load_objective("ppo"), shape(under))
