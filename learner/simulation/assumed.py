"""Rates from the options of `async-rl simulate`, alone or over those of a recorded run."""

from __future__ import annotations

import os
from dataclasses import replace

from async_rl.cli.grammar import CommandLine
from async_rl.config import Config
from async_rl.config.tree import PAYLOAD_BYTES_PER_TOKEN
from async_rl.errors import ConfigError
from async_rl.launch.commands import computes_on_cpu
from async_rl.launch.preflight import CannotCheck, shape_to_check
from async_rl.plan.memory import PUSHED, memory_plan
from learner.simulation.prediction import Machines
from learner.simulation.rates import Rates

NEEDED = ("train-s", "worker-tok-s", "answer-tokens")


def machines_of(line: CommandLine, config: Config) -> Machines:
    own = len(os.sched_getaffinity(0)) if computes_on_cpu(config) else 0
    return Machines(cores=line.integer("cores", own), link_gb_s=line.number("link-gb-s", 0.0))


def assumed(line: CommandLine, config: Config, recorded: Rates | None) -> Rates:
    """Return the rates. Raises ConfigError if there are too few options for that."""
    rates = recorded if recorded is not None else _from_options(line, config)
    if (train_s := line.number("train-s")) is not None:
        rates = replace(rates, learner_s=train_s)
    if (push_s := line.number("push-s")) is not None:
        rates = replace(rates, push_s=push_s, push_workers=max(1, rates.push_workers))
    waits_s = line.number("wait-s", 0.0)
    return rates.with_waits(waits_s, siblings=config.batch.group_size) if waits_s else rates


def _from_options(line: CommandLine, config: Config) -> Rates:
    if missing := [name for name in NEEDED if not line.has(name)]:
        raise ConfigError(
            f"simulate needs rates: those of a recorded run, --from FOLDER, or assumed ones; --{missing[0]} is not given"
        )
    tokens = line.number("answer-tokens", 0.0)
    of_group = tokens * config.batch.group_size
    return Rates(
        learner_s=line.number("train-s", 0.0),
        group_s=of_group / line.number("worker-tok-s", 1.0),
        alone_s=tokens * line.number("token-s", 0.0),
        push_workers=0,
        weight_bytes=_weight_bytes(config),
        tokens=of_group,
        group_bytes=of_group * PAYLOAD_BYTES_PER_TOKEN,
    )


def _weight_bytes(config: Config) -> float:
    """Return the bytes that a push sends to a worker; 0 if the model's files are not here."""
    try:
        parts = memory_plan(config, shape_to_check(config)).host
    except CannotCheck:
        return 0.0
    return float(next(part.bytes for part in parts if part.name == PUSHED))
