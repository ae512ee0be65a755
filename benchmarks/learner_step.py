"""The learner's step: time of each phase, speed-up of packing, and overlap of learning with generation.

    python benchmarks/learner_step.py --rounds 9 --json result.json

The first two are measured in this process with a learner of one rank. For the third, generating and training a step's rollouts
are measured separately, each alone and each beside a busy core, and then a whole run with both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from pathlib import Path

import torch
import yaml
from end_to_end import CORES, exit_on_sigterm, keep_to_cores
from learner_parts.generation import Generation
from learner_parts.neighbour import busy_neighbour
from learner_parts.one_rank import PHASES, OneRank
from learner_parts.pipeline import RunFailed, pace_of_run
from learner_parts.rollouts import groups_of, lognormal_lengths

from async_rl.config import Config
from async_rl.models.from_config import model_shape
from async_rl.models.shape import ModelShape
from async_rl.tokenization.tokenizers import open_tokenizer
from learner.objective import load_objective

REPOSITORY = Path(__file__).resolve().parents[1]
GROUP_SIZE = 8
Figures = dict[str, float]


def split_and_packing(learner: OneRank, shape: ModelShape, args: argparse.Namespace) -> Figures:
    """Train the same rollouts packed, and padded to the longest, alternately."""
    lengths = lognormal_lengths(args.rollouts, median=args.median_tokens, longest=shape.max_positions, seed=5)
    common = {"group_size": GROUP_SIZE, "vocab_size": shape.vocab_size, "seed": 5}
    packed, padded = groups_of(lengths, **common), groups_of(lengths, padded_to=max(lengths), **common)
    rounds: list[dict[str, float]] = []
    ratios: list[float] = []
    for number in range(-1, args.rounds):  # the first round is a warm-up
        of_packed, of_padded = learner.step(packed), learner.step(padded)
        if number >= 0:
            rounds.append(of_packed)
            ratios.append(sum(of_padded.values()) / sum(of_packed.values()))
    step_s = statistics.median(sum(each.values()) for each in rounds)
    found = {f"{phase}_ms": 1e3 * statistics.median(each[phase] for each in rounds) for phase in PHASES}
    print(f"{len(lengths)} rollouts, {sum(lengths)} tokens, the longest has {max(lengths)}\n")
    for phase in PHASES:
        print(f"{phase:<12}{found[f'{phase}_ms']:9.2f} ms {found[f'{phase}_ms'] / step_s / 10:6.1f} %")
    print(f"{'step':<12}{1e3 * step_s:9.2f} ms, {sum(lengths) / step_s:.0f} tokens/s, {learner.peak_memory_mb:.0f} MB at most")
    print(f"packed / padded to the longest: {statistics.median(ratios):.2f} x as fast")
    return {
        **found,
        "step_ms": 1e3 * step_s,
        "tokens_per_s": sum(lengths) / step_s,
        "peak_memory_mb": learner.peak_memory_mb,
        "packed_vs_padded": statistics.median(ratios),
        "rollouts": len(lengths),
        "tokens": sum(lengths),
        "longest": max(lengths),
    }


async def alone(learner: OneRank, config: Config, shape: ModelShape, rounds: int) -> tuple[float, float]:
    """Return median seconds to generate a step's rollouts, and to train on rollouts of these lengths."""
    generation = Generation(config, shape, open_tokenizer(config.tokenizer))
    generate_s, learn_s = list[float](), list[float]()
    async with generation.engine:
        await generation.begin()
        for number in range(-1, rounds):
            spent, lengths = await generation.step()
            groups = groups_of(lengths, group_size=config.batch.group_size, vocab_size=shape.vocab_size, seed=number + 1)
            learned = sum(learner.step(groups).values())
            if number >= 0:
                generate_s.append(spent)
                learn_s.append(learned)
    return statistics.median(generate_s), statistics.median(learn_s)


def overlap(learner: OneRank, config: Config, shape: ModelShape, args: argparse.Namespace) -> Figures:
    """Return medians over the repeats. Ratios are taken within a repeat, when the machine is equally fast."""
    repeats = [one_overlap(learner, config, shape, args) for _ in range(args.repeats)]
    names = [name for name in repeats[0] if all(name in each for each in repeats)]  # CPU times are not known everywhere
    found = {name: statistics.median(each[name] for each in repeats) for name in names}
    print(f"\nmedians of {args.repeats}: run / slower of both {found['run_vs_slower']:.2f}, ", end="")
    print(f"with the other core busy {found['run_vs_busy_slower']:.2f}; run / sum of both {found['run_vs_sum']:.2f}")
    return found


def one_overlap(learner: OneRank, config: Config, shape: ModelShape, args: argparse.Namespace) -> Figures:
    generate_s, learn_s = asyncio.run(alone(learner, config, shape, args.rounds))
    with busy_neighbour():
        busy_generate_s, busy_learn_s = asyncio.run(alone(learner, config, shape, args.rounds))
    pace = pace_of_run(args.config, args.steps)
    cpu = ", ".join(f"{role} {seconds:.3f} s" for role, seconds in pace.cpu_s.items())
    slower, busy_slower = max(generate_s, learn_s), max(busy_generate_s, busy_learn_s)
    print(f"\nalone on the machine:      generate {generate_s:.3f} s, learn {learn_s:.3f} s")
    print(f"with the other core busy:  generate {busy_generate_s:.3f} s, learn {busy_learn_s:.3f} s")
    print(f"a step of the run:         {pace.step_s:.3f} s, of which the learner waits {100 * pace.idle_share:.0f} %")
    if pace.cpu_s:
        print(f"CPU time of that step:     {cpu}, of {CORES} cores x {pace.step_s:.3f} s")
        print(f"worker's CPU / generate:   {pace.cpu_s['worker'] / generate_s:.2f}")
    print(f"run / slower of both: {pace.step_s / slower:.2f}, with the other core busy {pace.step_s / busy_slower:.2f}")
    print(f"run / sum of both:    {pace.step_s / (generate_s + learn_s):.2f}")
    return {
        "generate_s": generate_s,
        "learn_s": learn_s,
        "busy_generate_s": busy_generate_s,
        "busy_learn_s": busy_learn_s,
        "run_step_s": pace.step_s,
        "run_vs_slower": pace.step_s / slower,
        "run_vs_busy_slower": pace.step_s / busy_slower,
        "run_vs_sum": pace.step_s / (generate_s + learn_s),
        "run_idle_share": pace.idle_share,
        **{f"{role}_cpu_s": seconds for role, seconds in pace.cpu_s.items()},
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=REPOSITORY / "configs" / "end_to_end.yaml", help="the run")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rollouts", type=int, default=64, help="rollouts of the measured step")
    parser.add_argument("--median-tokens", type=int, default=64, help="median of their lognormal lengths")
    parser.add_argument("--steps", type=int, default=30, help="steps of the timed run; 0: no run")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of the run and of the separate measurements")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if args.rounds < 1 or args.repeats < 1 or args.rollouts % GROUP_SIZE:
        parser.error(f"--rounds and --repeats must be at least 1, and --rollouts a multiple of {GROUP_SIZE}")
    return args


def main() -> None:
    args = parse_args()
    figures: Figures = {"rounds": args.rounds, "repeats": args.repeats, "load_before": os.getloadavg()[0]}
    exit_on_sigterm()
    keep_to_cores()
    config = Config.model_validate(yaml.safe_load(args.config.read_text()))
    shape = model_shape(config.model, open_tokenizer(config.tokenizer).vocab_size)
    learner = OneRank(config, load_objective(config.learner.objective), shape)
    try:
        figures |= split_and_packing(learner, shape, args)
        if args.steps > 0:
            figures |= overlap(learner, config, shape, args)
    except RunFailed as error:
        sys.exit(f"learner_step: {error}")
    finally:
        learner.close()
    if args.json:
        args.json.write_text(json.dumps(figures | {"torch": torch.__version__}, indent=2) + "\n")


if __name__ == "__main__":
    main()
