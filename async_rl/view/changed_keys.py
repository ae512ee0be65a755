"""Which settings differ from their defaults, however they came to their values: a run's own config.yaml names every key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from pydantic import BaseModel

Keys = tuple[str, ...]
_NO_DEFAULT = object()


def changed_keys(config: BaseModel) -> frozenset[str]:
    """Return the dotted keys of the values that are not their field's default; a `type` that chooses a section is one."""
    return frozenset(".".join(keys) for keys in _changed(config, _NO_DEFAULT, ()))


def _changed(value: Any, default: Any, keys: Keys) -> Iterator[Keys]:
    if isinstance(value, BaseModel):
        is_chosen = type(default) is not type(value)
        for name, field in type(value).model_fields.items():
            given = getattr(value, name)
            if is_chosen and name == "type":
                yield (*keys, name)
            elif is_chosen:
                own = _NO_DEFAULT if field.is_required() else field.get_default(call_default_factory=True)
                yield from _changed(given, own, (*keys, name))
            else:
                yield from _changed(given, getattr(default, name), (*keys, name))
    elif value == default:
        return
    elif isinstance(value, dict) and value:
        for name, item in cast("dict[str, Any]", value).items():
            known = cast("dict[str, Any]", default).get(name, _NO_DEFAULT) if isinstance(default, dict) else _NO_DEFAULT
            yield from _changed(item, known, (*keys, str(name)))
    elif isinstance(value, list | tuple) and any(isinstance(item, BaseModel | dict) for item in cast("list[Any]", value)):
        for place, item in enumerate(cast("list[Any]", value)):
            yield from _changed(item, _NO_DEFAULT, (*keys, str(place)))
    else:
        yield keys
