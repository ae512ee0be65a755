"""A YAML reader that keeps the file and line of every value.

Scalars follow YAML 1.2: 1e-6 is a number, and `no` is a word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from async_rl.errors import ConfigError

DEFAULT = "default"
"""Origin of values that neither a file nor the command line sets."""

MAX_DEPTH = 100
"""Maximum nesting of lists and mappings."""

Plain = bool | int | float | str | list["Plain"] | dict[str, "Plain"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    value: bool | int | float | str | None
    text: str
    """The source text, for text fields with a value like 007."""
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    items: tuple[Node, ...]
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    children: Mapping[str, Node]
    origin: str


Node = Leaf | Items | Branch


def plain(node: Node) -> Plain:
    match node:
        case Leaf():
            return node.value
        case Items():
            return [plain(item) for item in node.items]
        case Branch():
            return {key: plain(child) for key, child in node.children.items()}


def read_file(path: Path) -> Branch:
    """Read the mapping in a YAML file; an empty file is an empty mapping. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text") from error
    root = _parse(text, str(path))
    if isinstance(root, Branch):
        return root
    if isinstance(root, Leaf) and root.value is None:
        return Branch(children={}, origin=str(path))
    raise ConfigError(f"{root.origin}: a configuration file holds `key: value` lines")


def read_value(text: str, origin: str) -> Node:
    """Parse one value from a command line. What is not valid YAML (`*`, `a: b: c`) is plain text."""
    try:
        return _parse(text, origin, lines=False)
    except ConfigError:
        return Leaf(value=text, text=text, origin=origin)


def located(value: Plain, origin: str) -> Node:
    """Return a value as nodes that all have this origin. Raises ConfigError if it is nested too deeply."""
    return _parse(dump(value), origin, lines=False)


def dump(value: Plain) -> str:
    """Write YAML that `read_file` reads back to an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _parse(text: str, source: str, *, lines: bool = True) -> Node:
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return Leaf(value=None, text="", origin=source)
        return _Locator(loader, source, lines=lines).locate(root)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark is not None and lines else ""
        raise ConfigError(f"{source}{line}: not valid YAML: {error.problem}") from error
    except RecursionError:
        raise ConfigError(f"{source}: values are nested deeper than {MAX_DEPTH} levels") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from error
    finally:
        loader.dispose()  # pyright: ignore[reportUnknownMemberType]


class _Locator:
    def __init__(self, loader: _Loader, source: str, *, lines: bool) -> None:
        self._loader = loader
        self._source = source
        self._lines = lines
        self._above: set[int] = set()

    def locate(self, node: yaml.Node, key: yaml.Node | None = None) -> Node:
        """Convert a node. The origin of a value in a mapping is the line of its key."""
        origin = self._origin(node if key is None else key)
        if isinstance(node, yaml.ScalarNode):
            return Leaf(value=self._loader.scalar(node), text=node.value, origin=origin)
        if id(node) in self._above:
            raise ConfigError(f"{origin}: this value contains itself")
        if len(self._above) == MAX_DEPTH:
            raise ConfigError(f"{origin}: values are nested deeper than {MAX_DEPTH} levels")
        self._above.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return Items(items=tuple(self.locate(item) for item in node.value), origin=origin)
            assert isinstance(node, yaml.MappingNode)
            return Branch(children=self._children(node), origin=origin)
        finally:
            self._above.remove(id(node))

    def _children(self, node: yaml.MappingNode) -> dict[str, Node]:
        written = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{self._origin(key)}: a key must be plain text")
            if written.count(key.value) > 1:
                raise ConfigError(f"{self._origin(node)}: the key {key.value!r} is written twice")
        self._loader.flatten_mapping(node)  # resolves `<<: *anchor`
        return {key.value: self.locate(value, key) for key, value in node.value}

    def _origin(self, node: yaml.Node) -> str:
        return f"{self._source}:{node.start_mark.line + 1}" if self._lines else self._source


class _Loader(yaml.SafeLoader):
    def scalar(self, node: yaml.ScalarNode) -> bool | int | float | str | None:
        match node.tag:
            case "tag:yaml.org,2002:null":
                return None
            case "tag:yaml.org,2002:bool":
                return node.value.lower() == "true"
            case "tag:yaml.org,2002:int":
                return int(node.value, 0) if node.value[:2] in ("0x", "0o") else int(node.value)
            case "tag:yaml.org,2002:float":
                return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))
            case "tag:yaml.org,2002:str":
                return node.value
            case _:
                raise yaml.constructor.ConstructorError(None, None, f"the tag {node.tag} is not supported", node.start_mark)


class _Dumper(yaml.SafeDumper):
    pass


_CORE: list[tuple[str, str, str]] = [
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
]


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {"": [("tag:yaml.org,2002:null", re.compile(r"^$"))]}
    for name, pattern, starts in _CORE:
        for start in starts:
            table.setdefault(start, []).append((f"tag:yaml.org,2002:{name}", re.compile(rf"^(?:{pattern})$")))
    return table


_resolver_table: Any = _resolvers()
_Loader.yaml_implicit_resolvers = _resolver_table
_Dumper.yaml_implicit_resolvers = _resolver_table
