"""The configurations of `async-rl train`, one per method."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from async_rl.config.hub.datasets import SUFFIXES, DatasetConfig
from async_rl.config.learner import FasterOptimizer, UpdatesConfig
from async_rl.config.pretrained import Pretrained, Required
from async_rl.config.run import MetricsConfig, ModelConfig, RunConfig, SupervisionConfig
from async_rl.config.section import Section
from async_rl.config.tokenizer import CharacterTokenizer, TokenizerConfig, with_own_tokenizer
from async_rl.config.tree import Config

Method = Literal["sft", "dpo", "rm", "distill"]


class ExampleDataset(DatasetConfig):
    """A dataset of examples: its rows, and what their columns are called."""

    columns: dict[str, str] = Field(default_factory=dict)
    """Columns, or dotted paths into them, that differ from the expected names: {prompt: question, response: answer}."""
    template: str = ""
    """Jinja template that makes the prompt from a row's columns, instead of the column `prompt` (docs/datasets.md)."""


class WeightedDataset(ExampleDataset):
    """One of several training datasets. Keys that it does not set have the values beside `datasets`."""

    name: str = ""
    """Name in metrics; must be unique. Empty: the last part of the path, and the subset."""
    weight: PositiveFloat = 1.0
    """Share of the examples, relative to the other datasets, whatever their sizes. Examples are evenly spread."""

    @property
    def label(self) -> str:
        return self.name if self.name else "-".join(part for part in (Path(self.path).stem, self.subset) if part)


class HeldOutConfig(ExampleDataset):
    """A held-out dataset, for evaluation only. Without `path` it is another split of the training dataset; `columns` and
    `template` that it does not set are those of the training data."""

    every: PositiveInt = 50
    """Steps between evaluations. There is also one before the first and one after the last step."""
    examples: PositiveInt | None = None
    """Use only this many examples from the beginning. Unset: all."""


class DataConfig(ExampleDataset):
    """The training dataset, or several, and how examples are rendered (docs/train.md)."""

    path: str = ""
    """A .jsonl, .json or .parquet file, a folder of such files or one written by `save_to_disk`, or the name of a dataset on
    the Hugging Face Hub, for example openai/gsm8k (docs/datasets.md). Give this or `datasets`."""
    datasets: tuple[WeightedDataset, ...] = ()
    """Several datasets, mixed by weight (docs/datasets.md)."""
    chat: bool = False
    """Render text prompts with the chat template, as a user message."""
    system: str = ""
    """System message before the prompt; implies `chat`."""
    shuffle: bool = True
    """Shuffle each epoch differently. The order depends only on run.seed, so a resumed run continues it."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """An example longer than a packed row or the model's context is an error (`refuse`) or is skipped (`drop`)."""
    held_out: HeldOutConfig | None = None
    """Unset: no evaluation."""

    @model_validator(mode="before")
    @classmethod
    def _others_share_its_keys(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        data = {key: value for key, value in cast("dict[str, Any]", given).items() if (key, value) != ("path", None)}
        rendering, rows = (
            {key: data[key] for key in keys if key in data}
            for keys in (("columns", "template"), ("subset", "split", "revision", "filters"))
        )
        shared: dict[str, Any] = {}
        if isinstance(datasets := data.get("datasets"), list | tuple):
            each = cast("Sequence[Any]", datasets)
            shared["datasets"] = [{**rows, **rendering, **entry} if isinstance(entry, dict) else entry for entry in each]
        if isinstance(held_out := data.get("held_out"), dict):
            same = {key: data[key] for key in ("path", "subset", "revision") if key in data and "path" not in held_out}
            shared["held_out"] = {**same, **rendering, **held_out}
        return {**data, **shared}

    @model_validator(mode="after")
    def _is_one_or_several(self) -> DataConfig:
        if bool(self.path) == bool(self.datasets):
            raise ValueError("give path, or datasets for several" + (", not both" if self.path else ""))
        if self.held_out is not None and any(_overlap(each, self.held_out) for each in self.datasets or (self,)):
            raise ValueError(
                f"held_out evaluates rows of {self.held_out.path} that are also trained: give it a split of its own "
                "(split: train[:95%] for training and held_out.split: train[95%:]), filters, or another path"
            )
        names = [dataset.label for dataset in self.datasets]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise ValueError(f"datasets must have different names, but two are {twice!r}; set `name` on one of them")
        return self


class TrainingBatch(Section):
    """Size of a step and of packed rows."""

    examples_per_step: PositiveInt = 32
    """Examples per optimizer step; with preference data, pairs."""
    bin_tokens: PositiveInt = 4096
    """Token capacity of one packed row (micro-batch). Both sequences of a pair are in the same row."""


class TrainingLearner(UpdatesConfig):
    """Length of the run, and the settings shared with the RL learner."""

    steps: PositiveInt | None = None
    """Optimizer steps of the run. Give this or epochs."""
    epochs: PositiveFloat | None = None
    """Passes over the dataset. If steps and epochs are both unset, 1."""

    @model_validator(mode="after")
    def _one_end(self) -> TrainingLearner:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs both set the length of the run; give one of them")
        return self


class SupervisedLearner(TrainingLearner):
    """The same, with the learning rate of methods that are not preference optimisation."""

    optimizer: FasterOptimizer = FasterOptimizer()  # pyright: ignore[reportIncompatibleVariableOverride]  # it is frozen


class TrainingConfig(Section):
    """Sections shared by all methods."""

    head: ClassVar[Literal["tokens", "scalar"]] = "tokens"
    compares: ClassVar[bool] = False
    """Whether an example is a pair of answers."""

    method: Method
    """The training method. Each method's configuration has its own as the default; it marks the file of a training run."""
    run: RunConfig = RunConfig()
    model: ModelConfig
    tokenizer: TokenizerConfig = CharacterTokenizer()
    data: DataConfig
    batch: TrainingBatch = TrainingBatch()
    learner: TrainingLearner = TrainingLearner()
    metrics: MetricsConfig = MetricsConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model computes. `auto`: CUDA if an NVIDIA driver is loaded, else the CPU."""

    @model_validator(mode="before")
    @classmethod
    def _model_has_its_tokenizer(cls, run: Any) -> Any:
        return with_own_tokenizer(run)

    @property
    def run_folder(self) -> Path:
        return (self.run.folder / self.run.name).absolute()

    def steps(self, table_rows: int) -> int:
        if self.learner.steps is not None:
            return self.learner.steps
        epochs = self.learner.epochs if self.learner.epochs is not None else 1.0
        return max(1, ceil(epochs * table_rows / self.batch.examples_per_step))

    def seen_from_anywhere(self) -> TrainingConfig:
        """Return the same configuration with absolute paths, for processes with another working directory."""
        tree = self.with_absolute_paths()
        if self.data.path:
            tree["data"]["path"] = _absolute(self.data)
        for written, dataset in zip(tree["data"]["datasets"], self.data.datasets, strict=True):
            written["path"] = _absolute(dataset)
        if self.data.held_out is not None:
            tree["data"]["held_out"]["path"] = _absolute(self.data.held_out)
        return type(self).model_validate(tree)


def _overlap(trained: DatasetConfig, held_out: DatasetConfig) -> bool:
    """Whether split and filters leave both the same rows. A single file has the same ones under every name of a split."""
    if (trained.path, trained.subset) != (held_out.path, held_out.subset):
        return False
    names, slices = ({split.partition("[")[part] for split in (trained.split, held_out.split)} for part in (0, 2))
    filters, others = set(trained.filters), set(held_out.filters)
    has_same_split = len(names) == 1 or Path(trained.path).suffix in SUFFIXES
    return has_same_split and (len(slices) == 1 or "" in slices) and (filters <= others or others <= filters)


def _absolute(table: DatasetConfig) -> str:
    """The absolute path; a path that does not exist is the name of a dataset on the hub and stays as it is."""
    path = Path(table.place)
    return str(path.absolute()) if path.exists() else table.path


class SupervisedTraining(TrainingConfig):
    method: Literal["sft"] = "sft"  # pyright: ignore[reportIncompatibleVariableOverride]  # it is frozen
    learner: SupervisedLearner = SupervisedLearner()  # pyright: ignore[reportIncompatibleVariableOverride]


def _ipo_is_normalised(chosen: dict[str, Any]) -> bool:
    return chosen.get("variant") == "ipo"


class DpoConfig(Section):
    """Direct preference optimisation. With d = log-probability of an answer under the policy minus under the reference:
    sigmoid: -log sigmoid(beta (d_chosen - d_rejected)), ipo: (d_chosen - d_rejected - 1 / (2 beta))^2
    """

    variant: Literal["sigmoid", "ipo"] = "sigmoid"
    """The loss."""
    beta: PositiveFloat = 0.1
    """Strength of the regularisation towards the reference; lower allows larger deviation."""
    length_normalised: bool = Field(default_factory=_ipo_is_normalised)
    """Compute d as the mean over an answer's tokens instead of the sum. Default: true with `ipo`, else false."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """With `sigmoid`: assumed share of pairs with swapped labels."""
    nll_coefficient: NonNegativeFloat = 0.0
    """Weight of an added negative log-likelihood of the chosen answers, which keeps them from becoming less likely. 0: none."""

    @model_validator(mode="after")
    def _smoothing_belongs_to_sigmoid(self) -> DpoConfig:
        if self.variant == "ipo" and self.label_smoothing > 0:
            raise ValueError("label_smoothing belongs to variant: sigmoid only; set it to 0 with variant: ipo")
        return self


class DpoSection(DpoConfig):
    """Direct preference optimisation: the loss, and the reference model."""

    reference: Pretrained | None = None
    """The reference model: a Hugging Face folder, or `{name: ...}`. Unset: the initial weights."""


class DpoTraining(TrainingConfig):
    compares: ClassVar[bool] = True

    method: Literal["dpo"] = "dpo"  # pyright: ignore[reportIncompatibleVariableOverride]  # it is frozen
    dpo: DpoSection = DpoSection()


class RewardModelTraining(TrainingConfig):
    head: ClassVar[Literal["tokens", "scalar"]] = "scalar"
    compares: ClassVar[bool] = True

    method: Literal["rm"] = "rm"  # pyright: ignore[reportIncompatibleVariableOverride]  # it is frozen
    learner: SupervisedLearner = SupervisedLearner()  # pyright: ignore[reportIncompatibleVariableOverride]


class DistillSection(Section):
    """Distillation from a teacher model."""

    teacher: Required
    """A model with the same tokenizer: a Hugging Face folder, or `{name: ...}`."""
    direction: Literal["forward", "reverse", "mixed"] = "forward"
    """`forward`: KL(teacher || student), mode-covering; `reverse`: KL(student || teacher), mode-seeking; `mixed`: the mean."""
    temperature: PositiveFloat = 1.0
    """Temperature of both distributions."""


class Distillation(TrainingConfig):
    method: Literal["distill"] = "distill"  # pyright: ignore[reportIncompatibleVariableOverride]  # it is frozen
    learner: SupervisedLearner = SupervisedLearner()  # pyright: ignore[reportIncompatibleVariableOverride]
    distill: DistillSection

    @model_validator(mode="after")
    def _has_no_pipeline(self) -> Distillation:
        if self.learner.parallel.pipeline > 1:
            raise ValueError(
                "distillation runs the teacher next to the student's logits, which is not supported with a pipeline; set "
                "learner.parallel.pipeline to 1 and use learner.parallel.tensor instead"
            )
        return self


METHODS: dict[Method, type[TrainingConfig]] = {
    "sft": SupervisedTraining,
    "dpo": DpoTraining,
    "rm": RewardModelTraining,
    "distill": Distillation,
}

AnyRun = Config | TrainingConfig
"""The configuration of a run of `async-rl run` or of `async-rl train`."""
