"""Times the phases of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from learner.model import TrainingModel


class Stopwatch:
    """Time between two marks counts for the phase that the second one ends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self._last = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def start(self) -> None:
        self.seconds.clear()
        self._last = self._now()

    def ends(self, phase: str) -> None:
        now = self._now()
        self.seconds[phase] += now - self._last
        self._last = now


class WatchedModel:
    """Wraps a model and marks the phases of a step; all other attributes are the model's."""

    def __init__(self, model: TrainingModel, watch: Stopwatch) -> None:
        self._model, self._watch = model, watch
        self._before_forward = "rows"
        for chunk in model.chunks:
            chunk.register_forward_pre_hook(self._begins)
            chunk.register_forward_hook(self._is_through)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def zero_gradients(self) -> None:
        self._before_forward = "rows"
        self._model.zero_gradients()

    def _begins(self, *_: Any) -> None:
        self._watch.ends(self._before_forward)
        self._before_forward = "backward"

    def _is_through(self, _module: Any, _arguments: Any, output: Tensor) -> None:
        self._watch.ends("forward")
        output.register_hook(lambda _gradient: self._watch.ends("loss"))

    def gradient_norm(self) -> float:
        self._watch.ends("backward")
        norm = self._model.gradient_norm()
        self._watch.ends("optimizer")
        return norm

    def update(self, gradient_norm: float) -> None:
        self._model.update(gradient_norm)
        self._watch.ends("optimizer")
