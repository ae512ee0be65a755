"""The page of all settings, docs/configuration_keys.md, made from the JSON schema of the configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from async_rl.cli.markdown_table import markdown_table

Schema = Mapping[str, Any]

_HEAD = """\
# Every setting

Made from the code by `async-rl config keys`. How files and overrides are written: [configuration](configuration.md). A value of
a run, and where it came from: `async-rl config show @ run.yaml`. N is a position in a list, NAME a name of your choice.
"""


def reference_page(schema: Schema) -> str:
    """Return the page in Markdown, a table for each section."""
    own = [(name, each) for name, each in schema["properties"].items() if not [*_sections(each, schema)]]
    parts = [_HEAD, _table("The run as a whole", "", [row for name, each in own for row in _rows(name, each, schema)])]
    for name, each in schema["properties"].items():
        if sections := [*_sections(each, schema)]:
            rows = [row for row in _rows(name, each, schema) if row[0] != name]
            parts.append(_table(f"`{name}`", " ".join(_text(section) for _, section in sections), rows))
    return "\n".join(parts)


def _table(heading: str, text: str, rows: list[tuple[str, str, str]]) -> str:
    table = markdown_table(("key", "default", ""), [(f"`{key}`", default, meaning) for key, default, meaning in rows])
    return "\n".join([f"## {heading}", "", *([text, ""] if text else []), table])


def _rows(key: str, field: Schema, schema: Schema) -> Iterator[tuple[str, str, str]]:
    """Yield key, default and meaning of a field, then those below it."""
    sections = [*_sections(field, schema)]
    if not sections or "description" in field or field.get("default", "") is None:
        yield key, _default(field, schema), _text(field) or " ".join(_text(section) for _, section in sections)
    for below, section in sections:
        for name, each in section["properties"].items():
            if name == "type" and "const" in each:
                yield f"{key}{below}.type", f"`{each['const']}`", _text(section)
            else:
                yield from _rows(f"{key}{below}.{name}", each, schema)


def _sections(field: Schema, schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield the sections that a field may hold, with what its key gets: nothing, `.N` in a list, `.NAME` in a mapping."""
    if reference := field.get("$ref"):
        target = schema["$defs"][reference.rpartition("/")[2]]
        if target.get("properties"):
            yield "", target
    for variant in (*field.get("anyOf", ()), *field.get("oneOf", ())):
        yield from _sections(variant, schema)
    for word, item in ((".N", field.get("items")), (".NAME", field.get("additionalProperties"))):
        if isinstance(item, dict):
            yield from ((word + below, section) for below, section in _sections(item, schema))  # pyright: ignore[reportUnknownArgumentType]


def _default(field: Schema, schema: Schema) -> str:
    choices = [json.dumps(choice).strip('"') for choice in _choices(field)]
    if "default" not in field:
        default = "required"
    elif field["default"] is None:
        default = "unset"
    elif [*_sections(field, schema)] and field["default"]:
        default = ""
    else:
        default = f"`{json.dumps(field['default'])}`".replace('`""`', "empty")
    others = [f"`{choice}`" for choice in choices if f'"{choice}"' != json.dumps(field.get("default"))]
    return f"{default}; or {', '.join(others)}" if others else default


def _choices(field: Schema) -> Iterator[Any]:
    yield from field.get("enum", ())
    if "const" in field:
        yield field["const"]
    for variant in field.get("anyOf", ()):
        yield from _choices(variant)


def _text(described: Schema) -> str:
    return " ".join(described.get("description", "").split()).replace("<", "\\<")
