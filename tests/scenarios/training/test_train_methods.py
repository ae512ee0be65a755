"""Each method on the real model: its gradient is the formula's, other texts of a row do not matter, and it learns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from async_rl.config.training import DistillSection, DpoConfig, Method
from async_rl.errors import ConfigError
from async_rl.megatron import parallel
from async_rl.megatron.model import build_model, forward_packed, pack
from async_rl.models.shape import Head, ModelShape
from async_rl.tokenization.rendering import RenderedText
from learner.batches.device_rows import ModelRow
from learner.model import FrozenModel
from learner.training.methods import Distill, Dpo, RewardModel, Supervised
from learner.training.methods import Method as Learning
from learner.training.models import check
from learner.training.packed import ExampleCounts, text_row
from tests.scenarios.training.train_stage import TABLES, config, run
from tests.support.small_models import write_folder

CPU = torch.device("cpu")
VOCABULARY = 17
SHAPE = ModelShape(
    hidden=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=24, vocab_size=VOCABULARY, max_positions=64, rope_theta=1e4,
    init_std=0.3,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    parallel.initialize(device=CPU)
    yield
    parallel.shutdown()


def model(seed: int, head: Head = "tokens") -> nn.Module:
    return build_model(replace(SHAPE, head=head), device=CPU, dtype=torch.float64, seed=seed)


def frozen(seed: int) -> FrozenModel:
    return FrozenModel(SHAPE, device=CPU, dtype=torch.float64, seed=seed)


def texts(seed: int, number: int) -> list[RenderedText]:
    """Texts of different lengths with untrained inner tokens; half of them as short as possible."""
    generator = torch.Generator().manual_seed(seed)

    def text(place: int) -> RenderedText:
        length = 2 if place % 2 else int(torch.randint(3, 9, (), generator=generator))
        said = (torch.rand(length, generator=generator) < 0.6).tolist()
        return RenderedText(
            token_ids=torch.randint(VOCABULARY, (length,), generator=generator).tolist(), trained=[False, *said[1:-1], True]
        )

    return [text(place) for place in range(number)]


# -- the formulas, text by text, without packing or our loss functions ------------------------------------------------------
def logits(model: nn.Module, text: RenderedText) -> Tensor:
    """What predicts each token that is said."""
    ids = torch.tensor(text.token_ids)
    return forward_packed(model, *pack([ids])).logits()[:-1][torch.tensor(text.trained[1:])]


def logprob(model: nn.Module, text: RenderedText) -> Tensor:
    said = torch.tensor(text.token_ids)[torch.tensor(text.trained)]
    return logits(model, text).log_softmax(-1)[torch.arange(len(said)), said]


def sft(trained: nn.Module, texts: list[RenderedText]) -> Tensor:
    return -torch.cat([logprob(trained, text) for text in texts]).mean()


def dpo(trained: nn.Module, texts: list[RenderedText]) -> Tensor:
    reference, total = frozen(1).chunks[0], torch.zeros(())
    for chosen, rejected in zip(texts[0::2], texts[1::2], strict=True):
        gains = [logprob(trained, text).sum() - logprob(reference, text).sum() for text in (chosen, rejected)]
        margin = 0.3 * (gains[0] - gains[1])
        total = total - 0.9 * logsigmoid(margin) - 0.1 * logsigmoid(-margin) - 0.5 * logprob(trained, chosen).mean()
    return total / (len(texts) / 2)


def ipo(trained: nn.Module, texts: list[RenderedText]) -> Tensor:
    reference, total = frozen(1).chunks[0], torch.zeros(())
    for chosen, rejected in zip(texts[0::2], texts[1::2], strict=True):
        gains = [(logprob(trained, text) - logprob(reference, text)).mean() for text in (chosen, rejected)]
        total = total + (gains[0] - gains[1] - 1 / (2 * 0.3)) ** 2
    return total / (len(texts) / 2)


def rm(trained: nn.Module, texts: list[RenderedText]) -> Tensor:
    scores = [forward_packed(trained, *pack([torch.tensor(text.token_ids)])).values()[-1] for text in texts]
    return -torch.stack(
        [logsigmoid(chosen - rejected) for chosen, rejected in zip(scores[0::2], scores[1::2], strict=True)]
    ).mean()


def distill(direction: str) -> Callable[[nn.Module, list[RenderedText]], Tensor]:
    def loss(trained: nn.Module, texts: list[RenderedText]) -> Tensor:
        teacher, found = frozen(1).chunks[0], []
        for text in texts:
            student_logs, teacher_logs = ((logits(each, text) / 1.5).log_softmax(-1) for each in (trained, teacher))
            forward = (teacher_logs.exp() * (teacher_logs - student_logs)).sum(-1)
            reverse = (student_logs.exp() * (student_logs - teacher_logs)).sum(-1)
            found.append({"forward": forward, "reverse": reverse, "mixed": (forward + reverse) / 2}[direction])
        return torch.cat(found).mean()

    return loss


def distilling(direction: Any) -> Callable[[], Learning]:
    return lambda: Distill(config=DistillSection(teacher=Path(), direction=direction, temperature=1.5), teacher=frozen(1))


SMOOTH = DpoConfig(beta=0.3, label_smoothing=0.1, nll_coefficient=0.5)
METHODS: dict[str, tuple[Callable[[], Learning], Callable[[nn.Module, list[RenderedText]], Tensor]]] = {
    "sft": (Supervised, sft),
    "dpo": (lambda: Dpo(config=SMOOTH, reference=frozen(1)), dpo),
    "ipo": (lambda: Dpo(config=DpoConfig(variant="ipo", beta=0.3), reference=frozen(1)), ipo),
    "rm": (RewardModel, rm),
    **{direction: (distilling(direction), distill(direction)) for direction in ("forward", "reverse", "mixed")},
}


@pytest.mark.parametrize("name", METHODS)
def test_the_gradient_is_that_of_the_written_formula(name: str) -> None:
    """Also if the texts are in several rows, one of them a filler."""
    make, formula = METHODS[name]
    method, trained, given = make(), model(0, "scalar" if name == "rm" else "tokens"), texts(3, 6)
    counts = ExampleCounts(tokens=sum(text.num_trained for text in given), examples=3 if name in ("dpo", "ipo", "rm") else 6)
    rows = method.prepared([text_row(each, CPU) for each in (given[:4], given[4:], [])])
    made = [method.loss(row, forward_packed(trained, row.token_ids, row.positions, row.packing), counts) for row in rows]
    found = torch.autograd.grad(torch.stack([each.loss for each in made]).sum(), list(trained.parameters()))

    wanted = formula(trained, given)
    expected = torch.autograd.grad(wanted, list(trained.parameters()), allow_unused=True)
    assert sum(each.totals.sum_of("loss") for each in made) == pytest.approx(wanted.item(), rel=1e-6)
    for (parameter, _), ours, theirs in zip(trained.named_parameters(), found, expected, strict=True):
        wanted_gradient = theirs if theirs is not None else torch.zeros_like(ours)
        torch.testing.assert_close(ours, wanted_gradient, atol=1e-6, rtol=1e-5, msg=parameter)


@pytest.mark.parametrize("name", METHODS)
def test_untrained_tokens_do_not_leak(name: str) -> None:
    """Neither masked targets nor neighbours in the row change the gradient of a text."""
    make, _ = METHODS[name]
    method, trained, given = make(), model(0, "scalar" if name == "rm" else "tokens"), texts(5, 4)
    counts = ExampleCounts(tokens=1, examples=1)

    def gradient(row: ModelRow, *, of: int) -> list[Tensor]:
        """Of the row's loss by the last hidden states of its first tokens."""
        (prepared,) = method.prepared([row])
        output = forward_packed(trained, row.token_ids, row.positions, row.packing)
        (found,) = torch.autograd.grad(method.loss(prepared, output, counts).loss, [output.hidden])
        return [*found[:of]]

    alone, beside = text_row(given[:2], CPU), text_row(given, CPU)
    length = len(alone.token_ids)
    garbage = replace(beside, targets=torch.where(beside.mask != 0, beside.targets, 3))
    for row in (beside, garbage):
        torch.testing.assert_close(gradient(row, of=length), gradient(alone, of=length), atol=1e-6, rtol=1e-5)
    by_hidden = torch.stack(gradient(beside, of=len(beside.token_ids)))
    if name != "rm":
        assert (by_hidden[beside.mask == 0] == 0).all()


# -- learning ---------------------------------------------------------------------------------------------------------------
def learned(method: Method, folder: Path, *, steps: int, lora: Any = None, **sections: Any) -> list[dict[str, float]]:
    """What is held out, before and after."""
    parallel.shutdown()
    optimizer = {"learning_rate": 0.01, "decay": "cosine"}
    learner = {"steps": steps, "optimizer": optimizer, "lora": lora, "checkpoint_every": steps}
    table = TABLES[method in ("dpo", "rm")]
    held_out = {"path": f"configs/train/{table}_held_out.jsonl", "every": steps}
    batch = {"examples_per_step": 20, "bin_tokens": 512}
    model = {"size": {"hidden": 32, "layers": 2, "heads": 4}}
    made = config(method, learner=learner, data={"held_out": held_out}, batch=batch, model=model, **sections)
    return run(made, folder)[0].examined


def test_supervised_training_learns_to_count(tmp_path: Path) -> None:
    before, after = learned("sft", tmp_path, steps=40)
    assert before["perplexity"] > 10
    assert after["perplexity"] < 2.5  # where to end is anybody's guess


def test_dpo_learns_the_preference(tmp_path: Path) -> None:
    before, after = learned("dpo", tmp_path, steps=30)
    assert after["loss"] < 0.5 < before["loss"]
    assert after["accuracy"] >= 0.8
    assert after["margin"] > 0.5


def test_adapters_learn_the_preference_against_their_base(tmp_path: Path) -> None:
    before, after = learned("dpo", tmp_path, steps=20, lora={})
    assert before["loss"] == pytest.approx(math.log(2))
    assert after["loss"] < before["loss"] - 0.01  # logits are bounded by the small embedding, which is frozen
    assert after["accuracy"] > 0.5


def test_a_reward_model_learns_what_is_better(tmp_path: Path) -> None:
    before, after = learned("rm", tmp_path, steps=100)
    assert after["loss"] < 0.6 < before["loss"]
    assert after["accuracy"] >= 0.75


def test_a_student_comes_to_say_what_its_teacher_would(tmp_path: Path) -> None:
    teacher = write_folder(tmp_path / "teacher", vocabulary=15)
    before, after = learned("distill", tmp_path, steps=30, distill={"teacher": str(teacher)})
    assert after["loss"] < 0.6 * before["loss"]


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    with pytest.raises(ConfigError, match=r"^distill\.teacher: cannot read"):
        check(config("distill", distill={"teacher": str(teacher)}), SHAPE)
    write_folder(teacher, vocabulary=16)
    with pytest.raises(ConfigError, match=r"distill\.teacher: the vocabulary of .* has 16 tokens and that of the model 15"):
        check(config("distill", distill={"teacher": str(teacher)}), replace(SHAPE, vocab_size=15))
