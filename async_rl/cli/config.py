"""`async-rl config show | schema | keys | check`."""

from __future__ import annotations

import json
import os

from async_rl.cli.grammar import CommandLine, Option, Verb
from async_rl.cli.train import resolve_any
from async_rl.config.loading import DEFAULT, leaves, to_show
from async_rl.errors import ConfigError


def show(line: CommandLine) -> int:
    loaded = resolve_any(line.config)
    shown = [(".".join(keys), json.dumps(value)) for keys, value in leaves(to_show(loaded.config))]
    key_width, value_width = (max(len(cells[column]) for cells in shown) for column in (0, 1))
    for key, value in shown:
        origin = loaded.origins[key]
        note = "" if origin == DEFAULT else f"  # {origin}"
        print(f"{key:<{key_width}}  {value:<{min(value_width, 40)}}{note}".rstrip())
    return 0


def schema(line: CommandLine) -> int:
    from async_rl.config import Config

    if line.config:
        raise ConfigError("config schema takes no configuration")
    print(json.dumps(Config.model_json_schema(), indent=2))
    return 0


def check(line: CommandLine) -> int:
    from async_rl.config import Config
    from async_rl.launch.preflight import ask, described_to_check, show_results
    from async_rl.plan.gpus import Gpus

    if (gpus := line.text("gpus")) is not None:
        Gpus.parse(gpus)
    config, results = described_to_check(resolve_any(line.config).config)
    fits = [] if gpus is None else [gpus]
    if not isinstance(config, Config):
        show_results([*results, *ask({"learner.training.checking": fits}, config, os.environ)])
        print("ok")
        return 0
    results += ask({"learner.checking": fits, "rollout_workers.checking.configuration": []}, config, os.environ)
    show_results(results)
    if not config.trains:
        print("ok: for `async-rl eval` alone, as all environments are evaluation_only")
        return 0
    print(
        f"ok: at most {config.limits.slots} groups of {config.batch.group_size} rollouts exist at once, none older than "
        f"{config.limits.age_bound} when trained"
    )
    return 0


def keys(line: CommandLine) -> int:
    from async_rl.cli.config_page import reference_page
    from async_rl.config import Config

    print(reference_page(Config.model_json_schema()), end="")
    return 0


GPUS = Option(name="gpus", value="NxGB", help="also check that the run fits on these GPUs, for example 8x80")
VERBS = (
    Verb(words="config show", help="Print every setting with its value and origin.", run=show, config="@ FILE"),
    Verb(words="config schema", help="Print the JSON schema of configuration files, for editors.", run=schema, config=""),
    Verb(words="config keys", help="Print every setting with its default and meaning, as Markdown.", run=keys, config=""),
    Verb(
        words="config check",
        help="Check a configuration as far as this machine can: environments, data, objective, models, layout, memory.",
        run=check,
        config="@ FILE",
        options=(GPUS,),
    ),
)
