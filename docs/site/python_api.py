"""Prints docs/python_api.md: the public names of `async_rl` and `rollout_workers`, from their stubs and sources."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

from async_rl.cli.markdown_table import markdown_table

ROOT = Path(__file__).parents[2]
PACKAGES = ("async_rl", "rollout_workers")
HEAD = """\
# The Python API

Made from the code by `make reference`: what `from async_rl import ...` and `from rollout_workers import ...` give. How it is
used: [environments](environments.md), [agents](agents.md), [attach your agent](attach_your_agent.md), [engines](engines.md).
"""


def python_api() -> str:
    """Return the page in Markdown, a section for each name."""
    loader = griffe.GriffeLoader(search_paths=[ROOT])
    packages = [loader.load(name) for name in PACKAGES]
    parts = [HEAD]
    for package in packages:
        parts.append(f"## {package.path}\n")
        parts += ["\n".join(section(package[name].final_target)) for name in public_names(package.path)]
    return "\n".join(parts)


def public_names(package: str) -> list[str]:
    """The names that the stub of a package exports."""
    stub = ROOT / package / "__init__.pyi"
    members = griffe.visit(package, filepath=stub, code=stub.read_text()).members
    return [name for name, member in members.items() if member.is_alias]


def section(found: griffe.Object) -> Iterator[str]:
    yield from (f"### {found.name}", "", "```python", *declaration(found), "```", "")
    if found.docstring:
        yield from (found.docstring.value, "")
    members = [member for member in found.members.values() if isinstance(member, griffe.Object)]
    if rows := [row(member) for member in members if is_shown(member)]:
        yield markdown_table(("name", ""), rows)


def declaration(found: griffe.Object) -> Iterator[str]:
    """Yield its lines, quoted as the code is."""
    if isinstance(found, griffe.Class | griffe.Function):
        yield from (f"@{decorator.value}" for decorator in found.decorators)
    if isinstance(found, griffe.Class):
        yield f"class {found.name}" + (f"({', '.join(map(str, found.bases))})" if found.bases else "")
    elif isinstance(found, griffe.Function):
        yield f"{'async ' if 'async' in found.labels else ''}def {found.signature()}".replace("'", '"')
    elif isinstance(found, griffe.Attribute):
        annotation = f": {found.annotation}" if found.annotation else ""
        yield (f"{found.name}{annotation} = {found.value}" if found.value else f"{found.name}{annotation}").replace("'", '"')


def is_shown(member: griffe.Object) -> bool:
    if member.name == "__init__" and member.parent:
        return "dataclass" not in member.parent.labels  # that of a dataclass repeats its fields
    return not member.name.startswith("_")


def row(member: griffe.Object) -> tuple[str, str]:
    """The declaration of a field or a method, and its meaning."""
    return f"`{' '.join(declaration(member))}`", " ".join(member.docstring.value.split()) if member.docstring else ""


if __name__ == "__main__":
    sys.stdout.write(python_api())
