"""The learning rate of each update, by hand."""

import pytest

from async_rl.config.learner import OptimizerConfig
from learner.optimizer.learning_rate import learning_rate


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("cosine", [0.5, 1.0, 1.0, 0.2 + 0.8 * (2 + 2**0.5) / 4, 0.6, 0.2 + 0.8 * (2 - 2**0.5) / 4, 0.2, 0.2]),
    ],
)
def test_warm_up_then_decay_then_the_floor(decay: str, expected: list[float]) -> None:
    config = OptimizerConfig.model_validate({"learning_rate": 1.0, "warmup_steps": 2, "min_learning_rate": 0.2, "decay": decay})
    assert [learning_rate(config, updates=updates, total=6) for updates in range(8)] == pytest.approx(expected)
