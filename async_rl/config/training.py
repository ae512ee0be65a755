"""The configurations of `async-rl train`: one for each method, which differ in a section or two."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from async_rl.config.learner import UpdatesConfig
from async_rl.config.loading import own_or_shipped
from async_rl.config.section import Section
from async_rl.config.supervision import SupervisionConfig
from async_rl.config.tokenizer import CharacterTokenizer, TokenizerConfig
from async_rl.config.tree import Config, MetricsConfig, ModelConfig, RunConfig

Method = Literal["sft", "dpo", "rm", "distill"]


class TableConfig(Section):
    path: str
    """A .jsonl or .parquet file, a folder that `datasets` saved, or the name of a dataset on the Hugging Face hub."""
    split: str = "train"
    """Of a dataset that has several."""

    @property
    def place(self) -> str:
        """The path, also of a table that we ship."""
        return str(own_or_shipped(Path(self.path)))


class HeldOutConfig(TableConfig):
    """A table that nobody trains on, with the columns of the other."""

    every: PositiveInt = 50
    """Steps. It is looked at before the first and after the last one too."""
    examples: PositiveInt | None = None
    """Of the table's beginning; unset means all."""


class DataConfig(TableConfig):
    columns: dict[str, str] = Field(default_factory=dict)
    """What the table calls them, where it is something else: {prompt: question, response: answer}."""
    chat: bool = False
    """A prompt that is a text is a user's message, for the chat template."""
    system: str = ""
    """A message before the prompt's; implies `chat`."""
    shuffle: bool = True
    """Each epoch in an order of its own. It depends on run.seed alone, so a run that is resumed goes on in it."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What becomes of an example that is longer than a packed row, or than the model's context."""
    held_out: HeldOutConfig | None = None


class TrainingBatch(Section):
    examples_per_step: PositiveInt = 32
    """Rows of the table in one optimizer step; with pairs, so many pairs."""
    bin_tokens: PositiveInt = 4096
    """Capacity of one packed micro-batch row. The sequences of a pair share one."""


class TrainingLearner(UpdatesConfig):
    steps: PositiveInt | None = None
    """The run ends after this many optimizer steps."""
    epochs: PositiveFloat | None = None
    """Or when the table was gone through so often. Unset as well means 1."""

    @model_validator(mode="after")
    def _one_end(self) -> TrainingLearner:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs both say when the run ends; give one of them")
        return self


class TrainingConfig(Section):
    """What all methods share."""

    head: ClassVar[Literal["tokens", "scalar"]] = "tokens"
    compares: ClassVar[bool] = False
    """A row of the table is a pair of answers."""

    method: Method
    """Each has its own as the default; a run's file says by it what kind of run it is."""
    run: RunConfig = RunConfig()
    model: ModelConfig
    tokenizer: TokenizerConfig = CharacterTokenizer()
    data: DataConfig
    batch: TrainingBatch = TrainingBatch()
    learner: TrainingLearner = TrainingLearner()
    metrics: MetricsConfig = MetricsConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @property
    def run_folder(self) -> Path:
        return (self.run.folder / self.run.name).absolute()

    def steps(self, table_rows: int) -> int:
        if self.learner.steps is not None:
            return self.learner.steps
        epochs = self.learner.epochs if self.learner.epochs is not None else 1.0
        return max(1, ceil(epochs * table_rows / self.batch.examples_per_step))

    def seen_from_anywhere(self) -> TrainingConfig:
        """The same run, with every path absolute."""
        tree = self.model_dump()
        tree["run"]["folder"] = self.run_folder.parent
        for section, key in self._folders():
            if path := tree[section].get(key):
                tree[section][key] = Path(path).absolute()
        tree["data"]["path"] = _absolute(self.data)
        if self.data.held_out is not None:
            tree["data"]["held_out"]["path"] = _absolute(self.data.held_out)
        return type(self).model_validate(tree)

    def _folders(self) -> tuple[tuple[str, str], ...]:
        """Sections and keys that are folders, where they are set."""
        return (("model", "folder"), ("tokenizer", "folder"))


def _absolute(table: TableConfig) -> str:
    """What is no file is a name on the hub."""
    path = Path(table.place)
    return str(path.absolute()) if path.exists() else table.path


class SupervisedTraining(TrainingConfig):
    method: Literal["sft"] = "sft"  # pyright: ignore[reportIncompatibleVariableOverride]  # it is frozen


def _ipo_is_normalised(chosen: dict[str, Any]) -> bool:
    return chosen.get("variant") == "ipo"


class DpoConfig(Section):
    """With d = log-probability under the policy - under the reference, of a whole answer:
    sigmoid: -log sigmoid(beta (d_chosen - d_rejected)), ipo: (d_chosen - d_rejected - 1 / (2 beta))^2
    """

    variant: Literal["sigmoid", "ipo"] = "sigmoid"
    beta: PositiveFloat = 0.1
    length_normalised: bool = Field(default_factory=_ipo_is_normalised)
    """d is a mean over an answer's tokens instead of their sum. On by default with `ipo`."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """With `sigmoid`: the share of pairs in which the rejected answer is assumed to be the better one."""
    nll_coefficient: NonNegativeFloat = 0.0
    """Adds so much of -log-probability per token of the chosen answers, which keeps them from becoming unlikely too."""

    @model_validator(mode="after")
    def _smoothing_belongs_to_sigmoid(self) -> DpoConfig:
        if self.variant == "ipo" and self.label_smoothing > 0:
            raise ValueError("label_smoothing belongs to variant: sigmoid; set it to 0 with variant: ipo")
        return self


class DpoSection(DpoConfig):
    reference: Path | None = None
    """A Hugging Face folder; unset means the weights that training began with."""


class DpoTraining(TrainingConfig):
    compares: ClassVar[bool] = True

    method: Literal["dpo"] = "dpo"  # pyright: ignore[reportIncompatibleVariableOverride]  # it is frozen
    dpo: DpoSection = DpoSection()

    def _folders(self) -> tuple[tuple[str, str], ...]:
        return (*super()._folders(), ("dpo", "reference"))


class RewardModelTraining(TrainingConfig):
    head: ClassVar[Literal["tokens", "scalar"]] = "scalar"
    compares: ClassVar[bool] = True

    method: Literal["rm"] = "rm"  # pyright: ignore[reportIncompatibleVariableOverride]  # it is frozen


class DistillSection(Section):
    teacher: Path
    """A Hugging Face folder of a model with the same tokenizer."""
    direction: Literal["forward", "reverse", "mixed"] = "forward"
    """KL(teacher || student) covers all that the teacher would say, KL(student || teacher) avoids what it would not, and
    `mixed` is half of each."""
    temperature: PositiveFloat = 1.0
    """Of both distributions."""


class Distillation(TrainingConfig):
    method: Literal["distill"] = "distill"  # pyright: ignore[reportIncompatibleVariableOverride]  # it is frozen
    distill: DistillSection

    @model_validator(mode="after")
    def _teacher_is_within_reach(self) -> Distillation:
        if self.learner.parallel.pipeline > 1:
            raise ValueError(
                "distillation asks the teacher row by row, where the student's logits are, which a pipeline would have to "
                "wait for; set learner.parallel.pipeline to 1, and divide by tensor instead"
            )
        return self

    def _folders(self) -> tuple[tuple[str, str], ...]:
        return (*super()._folders(), ("distill", "teacher"))


METHODS: dict[Method, type[TrainingConfig]] = {
    "sft": SupervisedTraining,
    "dpo": DpoTraining,
    "rm": RewardModelTraining,
    "distill": Distillation,
}

AnyRun = Config | TrainingConfig
"""What has a folder, a device and metrics."""
