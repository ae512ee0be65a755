"""Builds a configuration from `@ file.yaml --dotted.key value`, and records where each value came from.

Files are merged in order (sections key by key; lists are replaced), then the overrides apply. Changing the `type` of a
section discards its other keys, because they belong to the previous type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from pydantic import BaseModel, ValidationError

from async_rl.config.located_yaml import DEFAULT, Branch, Items, Leaf, Node, Plain, dump, located, plain, read_file, read_value
from async_rl.config.pretrained import fetched
from async_rl.config.problems import describe, numbers_meant_as_text
from async_rl.errors import ConfigError
from async_rl.imports.shipped_files import own_or_shipped
from async_rl.imports.shipped_files import shipped_configs as shipped_configs

if TYPE_CHECKING:
    from async_rl.config.tree import Config

COMMAND_LINE = "command line"
_EMPTY = Branch(children={}, origin=DEFAULT)

ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig(Generic[ModelT]):
    config: ModelT
    origins: Mapping[str, str]
    """Origin of each value by dotted key: `file:line`, "command line" or "default"."""
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    keys: tuple[str, ...]
    text: str

    @property
    def flag(self) -> str:
        return "--" + ".".join(self.keys)


def load(args: Sequence[str]) -> Config:
    """Load the configuration that a command line describes, and fetch the models that it names. Raises ConfigError."""
    return fetched(load_with_origins(args).config)


def load_named(args: Sequence[str]) -> Config:
    """Like `load`, but raises ConfigError if the run has no name, by which separately started processes find each other."""
    return fetched(load_unfetched(args))


def load_unfetched(args: Sequence[str]) -> Config:
    """Like `load_named`, but fetch nothing: for commands that need no model."""
    config = load_with_origins(args).config
    check_named(config.run.name)
    return config


def check_named(name: str) -> None:
    if not name:
        raise ConfigError("run.name is not set: processes that are started separately find each other by it (--run.name NAME)")


def load_with_origins(args: Sequence[str]) -> LoadedConfig[Config]:
    from async_rl.config.tree import Config

    return resolve(Config, args, example="configs/quickstart.yaml")


def resolve(model: type[ModelT], args: Sequence[str], *, example: str) -> LoadedConfig[ModelT]:
    """Load any kind of configuration; `example` is a file to suggest in the error when none was given."""
    files, overrides = parse(args)
    tree = _tree(files, overrides)
    try:
        config = _validate(model, tree)
    except ConfigError as error:
        hint = "" if files else f"\nNo file was given; start from one, for example: @ {example}"
        raise ConfigError(f"{error}{hint}") from error
    return LoadedConfig(config=config, origins=_origins(config, tree), files=files)


def load_over(model: type[ModelT], below: Plain, origin: str, args: Sequence[str]) -> LoadedConfig[ModelT]:
    """Load a configuration whose values come from `below`, which is from `origin`, unless a command line gives others."""
    base = located(below, origin)
    assert isinstance(base, Branch)
    files, overrides = parse(args)
    tree = _tree(files, overrides, base)
    config = _validate(model, tree)
    return LoadedConfig(config=config, origins=_origins(config, tree), files=files)


def read_key(key: str, args: Sequence[str]) -> Plain:
    """Read one top-level key without validating the rest; None if it is not set."""
    node = _tree(*parse(args)).children.get(key)
    return plain(node) if node is not None else None


def load_file(model: type[ModelT], path: Path) -> ModelT:
    """Load a YAML file as any pydantic model, with the same error messages."""
    return _validate(model, read_file(path))


def to_yaml(config: BaseModel) -> str:
    """The configuration as YAML; loading it gives an equal one."""
    tree: Plain = config.model_dump(mode="json")
    return dump(tree)


def to_show(config: BaseModel) -> dict[str, Any]:
    """The configuration as plain values for display, with secrets masked."""
    return masked(config.model_dump(mode="json"))


def masked(tree: Any, key: str = "") -> Any:
    """Plain values without passwords in addresses, and without texts whose key says that they are secret (`api_key`)."""
    if isinstance(tree, dict):
        return {name: masked(value, name) for name, value in cast("dict[str, Any]", tree).items()}
    if isinstance(tree, list):
        return [masked(item, key) for item in cast("list[Any]", tree)]
    if not isinstance(tree, str):
        return tree
    return "***" if tree and SECRET.search(key) else re.sub(r"//[^/@\s]*@", "//***@", tree)


SECRET = re.compile(r"(?:^|_)(?:key|token|secret|password|authorization)$", re.IGNORECASE)
"""Keys of secret texts; `..._file` names a file."""


def parse(args: Sequence[str]) -> tuple[tuple[Path, ...], tuple[Override, ...]]:
    """Split a command line into files and overrides, in order. Raises ConfigError."""
    files: list[Path] = []
    overrides: list[Override] = []
    words = iter(args)
    for word in words:
        if word.startswith("@"):
            name = word[1:] if len(word) > 1 else next(words, None)
            if name is None:
                raise ConfigError("`@` must be followed by the path of a YAML file")
            files.append(own_or_shipped(Path(name)))
        elif word.startswith("--") and len(word) > 2:
            flag, equals, text = word[2:].partition("=")
            if not equals:
                following = next(words, None)
                if following is None or following.startswith(("--", "@")):
                    raise ConfigError(f"--{flag} needs a value, for example: --{flag} VALUE")
                text = following
            if not all(flag.split(".")):
                raise ConfigError(f"--{flag} is not a dotted key such as --staleness.max_age")
            overrides.append(Override(keys=tuple(flag.split(".")), text=text))
        else:
            raise ConfigError(f"cannot read {word!r}: expected `@ file.yaml` or `--dotted.key value`")
    return tuple(files), tuple(overrides)


def _tree(files: Sequence[Path], overrides: Sequence[Override], tree: Branch = _EMPTY) -> Branch:
    for file in files:
        tree = _merge_branch(tree, read_file(file))
    for override in sorted(overrides, key=lambda override: override.keys[-1] != "type"):
        tree = _set(tree, override.keys, override)
    return tree


def _merge(under: Node | None, over: Node) -> Node:
    if isinstance(under, Branch) and isinstance(over, Branch):
        return _merge_branch(under, over)
    return over


def _merge_branch(under: Branch, over: Branch) -> Branch:
    if _changes_type(under, over.children.get("type")):
        return over
    children = dict(under.children)
    for key, node in over.children.items():
        children[key] = _merge(children.get(key), node)
    return Branch(children=children, origin=over.origin)


def _changes_type(branch: Branch, replacement: Node | None) -> bool:
    present = branch.children.get("type")
    return present is not None and replacement is not None and plain(present) != plain(replacement)


def _set(tree: Branch, keys: Sequence[str], override: Override) -> Branch:
    """Return the tree with one override applied; `keys` is the remaining path."""
    key, rest = keys[0], keys[1:]
    present = tree.children.get(key)
    node = _set_below(present, rest, override) if rest else _merge(present, read_value(override.text, COMMAND_LINE))
    if not rest and key == "type" and _changes_type(tree, node):
        return Branch(children={key: node}, origin=COMMAND_LINE)
    return Branch(children={**tree.children, key: node}, origin=tree.origin)


def _set_below(present: Node | None, rest: Sequence[str], override: Override) -> Node:
    if isinstance(present, Items):
        return _set_item(present, rest, override)
    if rest[0].isdecimal() and not isinstance(present, Branch):
        whole = ".".join(override.keys[: len(override.keys) - len(rest)])
        raise ConfigError(
            f"{override.flag}: no file sets {whole} to a list, so it has no item {rest[0]}; set {whole} as a whole"
        )
    branch = present if isinstance(present, Branch) else Branch(children={}, origin=COMMAND_LINE)
    return _set(branch, rest, override)


def _set_item(present: Items, rest: Sequence[str], override: Override) -> Items:
    count = len(present.items)
    if not rest[0].isdecimal() or int(rest[0]) >= count:
        raise ConfigError(f"{override.flag}: the list has items 0 to {count - 1}, there is no item {rest[0]!r}")
    index = int(rest[0])
    old = present.items[index]
    new = _set_below(old, rest[1:], override) if rest[1:] else _merge(old, read_value(override.text, COMMAND_LINE))
    return Items(items=(*present.items[:index], new, *present.items[index + 1 :]), origin=present.origin)


def _validate(model: type[ModelT], tree: Branch) -> ModelT:
    try:
        return model.model_validate(plain(_with_default_types(model, tree)))
    except ValidationError as error:
        meant = numbers_meant_as_text(error, model, tree)
        if not meant:
            raise ConfigError(describe(error, model, tree)) from error
    for keys in meant:
        tree = _with_text(tree, keys)
    return _validate(model, tree)


def _with_default_types(model: type[BaseModel], tree: Branch) -> Branch:
    """Add the `type` of a section's default value, so that its keys can be set without repeating the type."""
    children = dict(tree.children)
    for name, field in model.model_fields.items():
        child, default = children.get(name), field.default
        if isinstance(child, Branch) and isinstance(default, BaseModel):
            child = _with_default_types(type(default), child)
            implied = getattr(default, "type", None)
            if isinstance(implied, str) and "type" not in child.children:
                child = replace(child, children={"type": Leaf(value=implied, text=implied, origin=DEFAULT), **child.children})
            children[name] = child
    return replace(tree, children=children)


def _with_text(tree: Branch, keys: Sequence[str]) -> Branch:
    node = _as_text(tree, keys)
    assert isinstance(node, Branch)
    return node


def _as_text(node: Node, keys: Sequence[str]) -> Node:
    match node:
        case Leaf():
            return replace(node, value=node.text)
        case Items():
            index = int(keys[0])
            return replace(node, items=(*node.items[:index], _as_text(node.items[index], keys[1:]), *node.items[index + 1 :]))
        case Branch():
            return replace(node, children={**node.children, keys[0]: _as_text(node.children[keys[0]], keys[1:])})


def _origins(config: BaseModel, tree: Branch) -> dict[str, str]:
    resolved: Plain = config.model_dump(mode="json")
    return {".".join(keys): _origin(tree, keys) for keys, _ in leaves(resolved)}


def _origin(tree: Branch, keys: Sequence[str]) -> str:
    node: Node | None = tree
    for key in keys:
        match node:
            case Branch():
                node = node.children.get(key)
            case Items():
                node = node.items[int(key)]
            case _:
                break
    return node.origin if node is not None else DEFAULT


def leaves(tree: Plain, above: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Plain]]:
    """All values with their keys; a list is one value unless it contains sections."""
    if isinstance(tree, dict) and tree:
        return [leaf for key, value in tree.items() for leaf in leaves(value, (*above, key))]
    if isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        return [leaf for index, item in enumerate(tree) for leaf in leaves(item, (*above, str(index)))]
    return [(above, tree)]
