"""Turns pydantic's validation errors into sentences: the dotted key, its file and line, and what would be valid."""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from async_rl.config.located_yaml import DEFAULT, Branch, Items, Leaf, Node

Keys = tuple[str, ...]


def describe(error: ValidationError, model: type[BaseModel], tree: Branch) -> str:
    """Return one line per invalid key."""
    problems: dict[Keys, list[_Problem]] = {}
    for details in error.errors(include_url=False):
        if details["type"] == "default_factory_not_called":  # a default that depends on an invalid field
            continue
        place = _place(model, details["loc"])
        problems.setdefault(place.keys, []).append((details, place))
    causes = {keys: found for keys, found in problems.items() if not _has_deeper(keys, problems)}
    return "\n".join(f"{_name(keys, tree)}: {_sentence(found, model)}" for keys, found in causes.items())


def _has_deeper(keys: Keys, problems: Iterable[Keys]) -> bool:
    """Whether a nested key has a problem that causes this one: a list without its invalid item is too short."""
    return any(len(other) > len(keys) and other[: len(keys)] == keys for other in problems)


def numbers_meant_as_text(error: ValidationError, model: type[BaseModel], tree: Branch) -> list[Keys]:
    """Keys of text fields for which YAML found a number: a run named 007 keeps its zeros."""
    return [
        keys
        for details in error.errors(include_url=False)
        if details["type"] == "string_type"
        and isinstance(node := _nearest(tree, keys := _place(model, details["loc"]).keys), Leaf)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeyLocation:
    keys: Keys
    section: type[BaseModel] | None
    """The model that has the last key as a field."""
    in_scalar_union: bool


_Problem = tuple[ErrorDetails, _KeyLocation]


def _place(model: type[BaseModel], location: Sequence[int | str]) -> _KeyLocation:
    """Translate pydantic's location to keys of the file, without the labels it adds for members of a union."""
    keys: list[str] = []
    section: type[BaseModel] | None = None
    shape: Any = model
    in_scalar_union = False
    for item in location:
        section = None
        shape = _bare(shape)
        variants = _variants(shape)
        if len(variants) > 1:
            shape = next((variant for variant in variants if _label_fits(variant, str(item))), None)
            in_scalar_union = shape is None
            continue
        keys.append(str(item))
        if isinstance(shape, type) and issubclass(shape, BaseModel):
            section = shape
            shape = shape.model_fields[str(item)].annotation if item in shape.model_fields else None
        elif get_origin(shape) in (tuple, list, dict):
            arguments = get_args(shape)
            shape = arguments[1] if get_origin(shape) is dict else arguments[0]
        else:
            shape = None
    return _KeyLocation(keys=tuple(keys), section=section, in_scalar_union=in_scalar_union)


def _bare(shape: Any) -> Any:
    """Strip Annotated and `| None`, which do not appear in a location."""
    if get_origin(shape) is Annotated:
        return _bare(get_args(shape)[0])
    if get_origin(shape) in (Union, types.UnionType):
        members = [member for member in get_args(shape) if member is not types.NoneType]
        return _bare(members[0]) if len(members) == 1 else shape
    return shape


def _variants(shape: Any) -> tuple[Any, ...]:
    return get_args(shape) if get_origin(shape) in (Union, types.UnionType) else ()


def _label_fits(variant: Any, label: str) -> bool:
    bare = _bare(variant)
    if get_origin(bare) is dict:
        return label.startswith("dict[")
    if not (isinstance(bare, type) and issubclass(bare, BaseModel)):
        return False
    discriminator = bare.model_fields.get("type")
    tags = get_args(discriminator.annotation) if discriminator and get_origin(discriminator.annotation) is Literal else ()
    return label in tags or bare.__name__ == label


def _name(keys: Keys, tree: Branch) -> str:
    node = _nearest(tree, keys)
    where = f" ({node.origin})" if node.origin != DEFAULT else ""
    return (".".join(keys) if keys else "the configuration") + where


def _nearest(tree: Branch, keys: Sequence[str]) -> Node:
    """The node under `keys`, or the deepest one on the way to it."""
    node: Node = tree
    for key in keys:
        if isinstance(node, Branch) and key in node.children:
            node = node.children[key]
        elif isinstance(node, Items) and key.isdecimal() and int(key) < len(node.items):
            node = node.items[int(key)]
        else:
            break
    return node


def _sentence(found: Sequence[_Problem], model: type[BaseModel]) -> str:
    details, place = found[0]
    context = details.get("ctx", {})
    if place.in_scalar_union:
        return f"should be {' or '.join(_wanted(each) for each, _ in found)}, but it is {_shown(details['input'])}"
    match details["type"]:
        case "extra_forbidden":
            return _unknown(place, model)
        case "missing":
            return "is required, but nothing sets it"
        case "value_error":
            return str(context["error"])
        case "union_tag_invalid":
            return f"the type {context['tag']!r} is not one of {context['expected_tags']}"
        case "union_tag_not_found":
            return "its `type` must say which kind it is"
        case "model_type" | "model_attributes_type":
            return f"is a section with keys of its own, not the value {_shown(details['input'])}"
        case _:
            expected = details["msg"].removeprefix("Input ").removeprefix("String ")
            return f"{expected}, but it is {_shown(details['input'])}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 1]}…"


LONGEST_SHOWN = 120


def _wanted(details: ErrorDetails) -> str:
    """What one member of a union expects."""
    named = {"int_type": "a whole number", "int_parsing": "a whole number", "dict_type": "a mapping"}
    return named.get(details["type"], details["msg"].removeprefix("Input should be "))


def _unknown(place: _KeyLocation, model: type[BaseModel]) -> str:
    known_here = list(place.section.model_fields) if place.section is not None else []
    everywhere = _dotted_keys(model)
    *above, last = place.keys
    nearest = (
        [".".join((*above, key)) for key in get_close_matches(last, known_here, n=1)]
        or [key for key in everywhere if key.rpartition(".")[2] == last]
        or get_close_matches(".".join(place.keys), everywhere, n=1)
    )
    if nearest:
        return f"there is no such key; did you mean {nearest[0]}?"
    return f"there is no such key; known here are {', '.join(known_here)}"


def _dotted_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, field in model.model_fields.items():
        found.append(prefix + name)
        for variant in _variants(_bare(field.annotation)) or (_bare(field.annotation),):
            if isinstance(variant, type) and issubclass(variant, BaseModel):
                found += _dotted_keys(variant, f"{prefix}{name}.")
    return found
