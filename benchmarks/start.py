"""Measure how long a run takes to its first trained step, and to its next one after its learner is killed.

In the same rounds, to compare with: a Python process that imports torch and megatron.core and builds the quickstart model.

    python benchmarks/start.py --rounds 5 --json result.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parents[1]
STEPS_BEFORE_KILL = 25
LONGEST_S = 300.0

YARDSTICK = """\
import tempfile
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

with tempfile.NamedTemporaryFile() as file:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.FileStore(file.name, 1))
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=2, hidden_size=128, num_attention_heads=4, use_cpu_initialization=True)
    GPTModel(config, get_gpt_layer_local_spec(), vocab_size=16, max_sequence_length=128)
    torch.distributed.destroy_process_group()
"""


def build_a_model() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-W", "ignore", "-c", YARDSTICK], env=_environment(), check=True, capture_output=True)
    return time.monotonic() - began


def start_and_kill(folder: Path) -> tuple[float, float]:
    """Seconds from the command to the first step, and from the kill of the learner to the next one's first step."""
    settings = {"run.folder": folder, "run.name": "start", "learner.steps": 1_000_000}
    words = [str(word) for key, value in settings.items() for word in (f"--{key}", value)]
    command = [Path(sys.executable).with_name("async-rl"), "run", "@", REPOSITORY / "configs" / "quickstart.yaml", *words]
    journal, began = folder / "start" / "trained.jsonl", time.monotonic()
    with (
        (folder / "output.txt").open("w") as output,
        subprocess.Popen(command, env=_environment(), stdout=output, stderr=output) as run,
    ):
        try:
            first_s = _until(lambda: len(_rows(journal, "groups")) > 0) - began
            _until(lambda: len(_rows(journal, "groups")) >= STEPS_BEFORE_KILL)
            os.kill(json.loads((folder / "start" / "processes.json").read_text())["learner"], signal.SIGKILL)
            killed = time.monotonic()
            _until(lambda: len(_rows(journal, "resumed_after")) > 1)
            steps = len(_rows(journal, "groups"))
            next_s = _until(lambda: len(_rows(journal, "groups")) > steps) - killed
        finally:
            run.terminate()
    return first_s, next_s


def _rows(journal: Path, key: str) -> list[str]:
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [line for line in lines if f'"{key}"' in line]


def _until(holds: Callable[[], bool]) -> float:
    deadline = time.monotonic() + LONGEST_S
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit(f"the run did not get there within {LONGEST_S:g} s")
        time.sleep(0.01)
    return time.monotonic()


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    taken: dict[str, list[float]] = defaultdict(list)
    load = os.getloadavg()[0]
    for _ in range(args.rounds):
        taken["yardstick_s"].append(build_a_model())
        with tempfile.TemporaryDirectory() as folder:
            first_s, next_s = start_and_kill(Path(folder))
        taken["first_step_s"].append(first_s)
        taken["step_after_kill_s"].append(next_s)
        print({name: round(values[-1], 1) for name, values in taken.items()}, file=sys.stderr, flush=True)
    figures = {name: median(values) for name, values in taken.items()}
    for name in ("first_step", "step_after_kill"):
        ratios = [own / other for own, other in zip(taken[f"{name}_s"], taken["yardstick_s"], strict=True)]
        figures[f"{name}_vs_yardstick"] = median(ratios)
    figures |= {"rounds": args.rounds, "load_before": load}
    for name, value in figures.items():
        print(f"{name:28} {value:8.2f}")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
