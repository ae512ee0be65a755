"""The memory plan of a learner beside the memory that a real step takes.

    python benchmarks/memory.py --json result.json

Steps of the real learner on this CPU: with about 100 million parameters, where the process' memory is given beside that of its
tensors; and with Qwen3-0.6B and 4B at full size without values (torch's FakeTensorMode).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from memory_parts.tracked_step import tracked_step

from async_rl.config import Config
from async_rl.models.shape import ModelShape
from async_rl.plan.memory import memory_plan, total

SMALL = ModelShape(
    hidden=768, layers=12, heads=12, kv_heads=12, head_dim=64, ffn=2304, vocab_size=32_000, max_positions=1024,
    rope_theta=1e4,
)  # fmt: skip
"""About 116 million parameters."""
QWEN3 = ModelShape(
    hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, ffn=3072, vocab_size=151_936, max_positions=40_960,
    rope_theta=1e6, qk_norm=True,
)  # fmt: skip
"""Qwen3-0.6B."""
QWEN3_4B = replace(QWEN3, hidden=2560, layers=36, heads=32, ffn=9728)


def config(tokens: int, learner: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "model": {"size": {"hidden": 8, "layers": 1, "heads": 1}},  # the shape is given beside it
            "environments": [{"type": "even_digits"}],
            "batch": {"bin_tokens": tokens},
            "learner": learner,
            "device": "cpu",
        }
    )


def compare(name: str, shape: ModelShape, tokens: int, learner: dict[str, Any], *, has_values: bool) -> dict[str, Any]:
    run = config(tokens, learner)
    found, plan = tracked_step(run, shape, [tokens // 4] * 4, has_values=has_values), total(memory_plan(run, shape).learner)
    gib = {moment: round(size / 2**30, 3) for moment, size in found.peaks.items()}
    print(f"{name}: plan {plan / 2**30:.3f} GiB, tensors {found.peak / 2**30:.3f} GiB, plan / tensors {plan / found.peak:.3f}")
    print(f"  by moment: {gib}")
    row: dict[str, Any] = {"plan": plan, "tensors": found.peak, "ratio": plan / found.peak, "moments": dict(found.peaks)}
    if has_values:
        row |= {"resident": found.resident, "resident_ratio": plan / found.resident}
        print(f"  the process: {found.resident / 2**30:.3f} GiB more than before, plan / process {plan / found.resident:.3f}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a row of Qwen3-0.6B (4096)")
    parser.add_argument("--many-tokens", type=int, default=32_768, help="tokens of a longer row, with recompute: full (32768)")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--only", choices=("small", "full"), help="one of both models")
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    if args.only != "full":
        rows["small"] = compare("116M parameters, float32", SMALL, 1024, {}, has_values=True)
    if args.only != "small":
        for recompute in ("none", "selective", "full"):
            learner = {"precision": "bfloat16", "recompute": recompute}
            rows[recompute] = compare(
                f"Qwen3-0.6B, bfloat16, recompute {recompute}", QWEN3, args.tokens, learner, has_values=False
            )
        for name, shape in (("Qwen3-0.6B", QWEN3), ("Qwen3-4B", QWEN3_4B)):
            rows[f"{name} {args.many_tokens}"] = compare(
                f"{name}, bfloat16, recompute full, {args.many_tokens} tokens",
                shape,
                args.many_tokens,
                learner,
                has_values=False,
            )
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
