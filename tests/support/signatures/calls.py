"""Finds the calls that a source makes of functions and classes of other packages, by their full names."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.repository import ROOT


@dataclass(frozen=True, slots=True, order=True)
class Call:
    name: str
    """The full name of what is called, as it was imported: torch.cuda.Stream."""
    positional: int
    keywords: tuple[str, ...]
    where: str
    is_open: bool = False
    """It also passes *args or **kwargs, which cannot be read from the source."""

    def __str__(self) -> str:
        return f"{self.name} in {self.where}"


def calls_in(source: str, where: str, imported: Mapping[str, str]) -> Iterator[Call]:
    """Yield the calls of imported names; `imported` maps the names of the file to full ones."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (name := full_name(node.func, imported)) is not None:
            yield _call(node, name, where)


def inherited_constructions(source: str, where: str, imported: Mapping[str, str]) -> Iterator[Call]:
    """Yield the calls of `super().__init__` in subclasses of imported classes, under the name of that class."""
    for owner in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
        bases = [name for base in owner.bases if (name := full_name(base, imported)) is not None]
        for node in ast.walk(owner):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__" and len(bases) == 1:
                yield _call(node, bases[0], where)


def _call(node: ast.Call, name: str, where: str) -> Call:
    starred = any(isinstance(argument, ast.Starred) for argument in node.args) or any(
        each.arg is None for each in node.keywords
    )
    positional = sum(not isinstance(argument, ast.Starred) for argument in node.args)
    keywords = tuple(sorted(each.arg for each in node.keywords if each.arg is not None))
    return Call(name, positional, keywords, f"{where}:{node.lineno}", starred)


def full_name(node: ast.expr, imported: Mapping[str, str]) -> str | None:
    """Return the full name that an expression like `torch.cuda.Stream` stands for, None if it is not an imported one."""
    if isinstance(node, ast.Name):
        return imported.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := full_name(node.value, imported)) is not None:
        return f"{owner}.{node.attr}"
    return None


def imports_of(source: str) -> dict[str, str]:
    """Return the full names of what a file imports, anywhere in it, by the names it uses; the first where it tries several."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = {alias.asname or alias.name.partition(".")[0]: _imported_as(alias) for alias in node.names} | found
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            found = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names} | found
    return found


def _imported_as(alias: ast.alias) -> str:
    return alias.name if alias.asname is not None else alias.name.partition(".")[0]


PRODUCT = ("async_rl", "buffer", "learner", "rollout_workers")
COMPAT = "async_rl.megatron.compat"
ON_DEVICES = ("torch.cuda.", "torch._", "torch.nn.attention.", "torch.backends.cuda.", "torch.distributed.ProcessGroupNCCL")
"""What torch has for GPUs, or promises to no one."""
DEVICE_KEYWORDS = {"pin_memory", "out_dtype", "enable_gqa", "fused"}
"""Arguments of other functions of torch that matter on GPUs."""


@cache
def product_calls() -> tuple[Call, ...]:
    """Return the calls of Megatron and Transformer Engine in this repository, and those of torch that matter on GPUs."""
    through_compat = {name: full for name, full in imports_of(_source(COMPAT)).items() if full.startswith("megatron.")}
    found: list[Call] = []
    for path in sorted(path for package in PRODUCT for path in (ROOT / package).rglob("*.py")):
        source = path.read_text()
        imported = imports_of(source)
        for name, full in imported.items():
            if full.rpartition(".")[0] == COMPAT:
                imported[name] = through_compat.get(full.rpartition(".")[2], full)
        where = str(path.relative_to(ROOT))
        made = [*calls_in(source, where, imported), *inherited_constructions(source, where, imported)]
        found += [call for call in made if _matters(call)]
    return tuple(found)


def _matters(call: Call) -> bool:
    if call.name.startswith(("megatron.", "transformer_engine.")):
        return True
    return call.name.startswith("torch.") and (call.name.startswith(ON_DEVICES) or bool(DEVICE_KEYWORDS & {*call.keywords}))


def _source(module: str) -> str:
    return Path(ROOT, *module.split(".")).with_suffix(".py").read_text()
