"""The report that a check fills while it runs: figures, and claims that must be true."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from async_rl.models.shape import ModelShape
from gpu_checks.one_check import Skipped

Figure = float | str


@dataclass(slots=True)
class Report:
    """Filled and written during the check, so that earlier figures survive a failure or a deadline."""

    figures: dict[str, Figure] = field(default_factory=dict[str, Figure])
    on_figure: Callable[[], None] = lambda: None

    def note(self, **figures: Figure) -> None:
        self.figures |= figures
        self.on_figure()

    def attempt(self, name: str, attempted: Callable[[], Figure]) -> None:
        """Note what is returned, or why it cannot be done here."""
        try:
            self.note(**{name: attempted()})
        except Exception as error:
            self.note(**{name: f"no ({type(error).__name__}: {str(error).partition(chr(10))[0][:100]})"})

    def at_most(self, name: str, value: float, limit: float) -> None:
        self.note(**{name: value})
        if not value <= limit:
            raise AssertionError(f"{name} is {value:.3g}, which is more than {limit:g}")

    def require(self, claim: bool, otherwise: str) -> None:
        if not claim:
            raise AssertionError(otherwise)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The device on which the checks run."""

    device: torch.device

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def require_memory(self, for_what: str, *, gib: float) -> None:
        if not self.is_gpu:
            raise Skipped(f"{for_what} needs a GPU")
        if (found := torch.cuda.get_device_properties(self.device).total_memory / 2**30) < gib:
            raise Skipped(f"{for_what} needs {gib:g} GiB of GPU memory, and there are {found:.0f}")

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)


Check = Callable[[Machine, Report], None]
Checks = Mapping[str, Check]

SMALL = ModelShape(
    hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, ffn=512, vocab_size=96, max_positions=512, rope_theta=1e4,
    init_std=0.05,
)  # fmt: skip
QWEN3_600M = ModelShape(
    hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, ffn=3072, vocab_size=151936, max_positions=4096,
    rope_theta=1e6, norm_eps=1e-6, qk_norm=True,
)  # fmt: skip
"""The dimensions of Qwen3-0.6B, with random weights."""
