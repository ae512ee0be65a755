"""The table of signatures: `released.json`, made by `make signatures` from released wheels.

package -> full name -> signature, without annotations and values of defaults -> the releases that have it, oldest first.
Parameters with defaults that no call uses are left out. `megatron_calls` has Megatron's own calls of Transformer Engine.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.repository import ROOT
from tests.support.signatures.calls import Call, calls_in, imports_of, inherited_constructions, product_calls
from tests.support.signatures.reading import Read, Signatures
from tests.support.signatures.releases import DISTRIBUTIONS, RELEASES, TRANSFORMER_ENGINE_BESIDE, reader

TABLE = Path(__file__).with_name("released.json")
CACHE = ROOT / ".cache" / "released_sources"
INDIRECT = {"torch.nn.attention.varlen.varlen_attn"}
"""Called under other names, with arguments that depend on the release: kept with all parameters."""
TE_OF_MEGATRON = "megatron/core/extensions/transformer_engine.py"


@cache
def table() -> Mapping[str, Any]:
    return json.loads(TABLE.read_text())


SPECS = "megatron.core.models.gpt.gpt_layer_specs"
PASSED_ON = {
    f"{SPECS}.get_gpt_layer_local_spec": f"{SPECS}.get_gpt_layer_local_submodules",
    f"{SPECS}.get_gpt_layer_with_transformer_engine_spec": f"{SPECS}.get_gpt_layer_with_transformer_engine_submodules",
}
"""Functions that, in some releases, pass all arguments on to another."""


def released(name: str) -> dict[str, list[str]]:
    """Return the signatures of a name by release: several of one with overloads, none of one that lacks it."""
    distribution = _distribution(name)
    found: dict[str, list[str]] = {version: [] for version in RELEASES[distribution]}
    for signature, versions in table()[distribution].get(name, {}).items():
        for version in versions.split():
            found[version].append(signature)
    behind = released(PASSED_ON[name]) if name in PASSED_ON else {}
    return found | {version: behind[version] for version, known in found.items() if known == ["*args, **kwargs"]}


def takes(signatures: Iterable[str], call: Call) -> bool:
    """Return whether one of the signatures takes the call's arguments."""
    return any(_binds(signature, call) for signature in signatures)


def _binds(signature: str, call: Call) -> bool:
    # only names, `*`, `/` and `...` stand in it
    known = inspect.signature(eval(f"lambda {signature}: None"))
    bind = known.bind_partial if call.is_open else known.bind
    try:
        bind(*[None] * call.positional, **dict.fromkeys(call.keywords))
    except TypeError:
        return False
    return True


def parsed(signature: str) -> ast.arguments:
    return ast.parse(f"lambda {signature}: None", mode="eval").body.args  # pyright: ignore[reportAttributeAccessIssue]


def made(folder: Path = CACHE) -> dict[str, Any]:
    """Make the table from released sources."""
    read = {(each, version): reader(each, version, folder) for each, versions in RELEASES.items() for version in versions}
    ours, theirs = (
        product_calls(),
        {v: calls_of_transformer_engine(read["megatron-core", v]) for v in TRANSFORMER_ENGINE_BESIDE},
    )
    calls = [*ours, *(call for found in theirs.values() for call in found)]
    names = sorted({call.name for call in calls} | INDIRECT | {*PASSED_ON.values()})
    made: dict[str, Any] = {
        distribution: {name: {} for name in names if _distribution(name) == distribution} for distribution in RELEASES
    }
    for (distribution, version), each in read.items():
        known = Signatures(each)
        for name, signatures in made[distribution].items():
            used = [call for call in calls if PASSED_ON.get(call.name, call.name) == name or call.name == name]
            for signature in known.of(name):
                short = signature if name in INDIRECT else shortened(signature, used)
                signatures[short] = f"{signatures.get(short, '')} {version}".strip()
    made["megatron_calls"] = {
        version: [
            f"{call.where} {call.name} {call.positional} {','.join(call.keywords)} {'open' * call.is_open}" for call in found
        ]
        for version, found in theirs.items()
    }
    return made


def _distribution(name: str) -> str:
    return DISTRIBUTIONS[name.partition(".")[0]]


def megatron_calls(version: str) -> list[Call]:
    """Return the calls of Transformer Engine in a release of megatron-core."""
    lines: list[str] = table()["megatron_calls"][version]
    parts = [line.split(" ") for line in lines]
    return [
        Call(name, int(positional), tuple(filter(None, keywords.split(","))), where, is_open=bool(is_open))
        for where, name, positional, keywords, is_open in parts
    ]


def calls_of_transformer_engine(read: Read) -> list[Call]:
    """Return Megatron's calls of Transformer Engine's classes and functions, those of base classes included."""
    source = read(TE_OF_MEGATRON)
    assert source is not None
    imported = imports_of(source)
    found = [*calls_in(source, TE_OF_MEGATRON, imported), *inherited_constructions(source, TE_OF_MEGATRON, imported)]
    return sorted({call for call in found if call.name.startswith("transformer_engine.")})


def shortened(signature: str, calls: Sequence[Call]) -> str:
    """Leave out parameters with defaults that none of the calls uses."""
    used = {word for call in calls for word in call.keywords}
    given = max((call.positional for call in calls), default=0)
    arguments = parsed(signature)
    places = [*arguments.posonlyargs, *arguments.args]
    required = len(places) - len(arguments.defaults)
    kept = [place for place, each in enumerate(places) if place < max(required, given) or each.arg in used]
    by_word = [
        (each, default)
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None or each.arg in used
    ]
    # what follows a parameter that is left out can be given by its name alone
    in_place = [place for place in kept if place < len(kept) and kept[place] == place]
    by_name = [place for place in kept if place not in in_place]
    short = ast.arguments(
        posonlyargs=[each for place, each in enumerate(arguments.posonlyargs) if place in in_place],
        args=[places[place] for place in in_place if place >= len(arguments.posonlyargs)],
        defaults=[ast.Constant(...) for place in in_place if place >= required],
        vararg=arguments.vararg,
        kwonlyargs=[*(places[place] for place in by_name), *(each for each, _ in by_word)],
        kw_defaults=[*(ast.Constant(...) for _ in by_name), *(default for _, default in by_word)],
        kwarg=arguments.kwarg,
    )
    return ast.unparse(short)


if __name__ == "__main__":
    TABLE.write_text(json.dumps(made(), indent=1, sort_keys=True) + "\n")
    sys.stdout.write(f"{TABLE.relative_to(ROOT)} is written\n")
