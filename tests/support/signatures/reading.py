"""Reads signatures out of Python sources and stubs without importing them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import PurePosixPath

Read = Callable[[str], str | None]
"""Returns the text of a file of a distribution, None if it has no such file."""


class Signatures:
    """Looks up functions and classes of one distribution by their full names, following its imports."""

    def __init__(self, read: Read) -> None:
        self._tree = cache(lambda path: None if (text := read(path)) is None else ast.parse(text))

    def of(self, name: str) -> list[str]:
        """Return the signatures of a function, or of a class's constructor: one per overload, none if it is not found."""
        return [_written(each) for each in self._definitions(name) for each in self._callables(name, each)]

    def has(self, name: str) -> bool:
        return self._module(name) is not None or bool(self._definitions(name))

    def _module(self, name: str) -> tuple[str, ast.Module] | None:
        base = name.replace(".", "/")
        for path in (f"{base}.py", f"{base}.pyi", f"{base}/__init__.py", f"{base}/__init__.pyi"):
            if (tree := self._tree(path)) is not None:
                return path, tree
        return None

    def _definitions(self, name: str, seen: frozenset[str] = frozenset()) -> list[ast.stmt]:
        """Return the statements that define a name."""
        if name in seen:
            return []
        owner, _, last = name.rpartition(".")
        if not owner:
            return []
        if (module := self._module(owner)) is None:  # inside a class
            classes = [each for each in self._definitions(owner, seen | {name}) if isinstance(each, ast.ClassDef)]
            return [each for owner_class in classes for each in _named(owner_class.body, last)]
        path, tree = module
        body = [*_statements(tree.body)]
        if found := _named(body, last):
            return found
        for node in body:
            if isinstance(node, ast.ImportFrom):
                origin = _absolute(node, path)
                for alias in node.names:
                    if (alias.asname or alias.name) == last:
                        return self._definitions(f"{origin}.{alias.name}", seen | {name})
                    if alias.name == "*" and (found := self._definitions(f"{origin}.{last}", seen | {name})):
                        return found
        return [each for hidden in _stubs_of(owner, last) for each in self._definitions(hidden, seen | {name})]

    def _callables(self, name: str, node: ast.stmt) -> Iterator[ast.arguments]:
        if isinstance(node, ast.FunctionDef):
            is_method = self._module(name.rpartition(".")[0]) is None and [each.arg for each in node.args.args[:1]] in (
                ["self"],
                ["cls"],
            )
            yield _without_first(node.args) if is_method else node.args
        elif isinstance(node, ast.ClassDef):
            unknown = [] if not node.bases else [ast.arg("args"), ast.arg("kwargs")]  # of a class that cannot be read
            default = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
            if unknown:
                default.vararg, default.kwarg = unknown
            yield from [*self._constructors(name, node)] or [default]

    def _constructors(self, name: str, node: ast.ClassDef) -> Iterator[ast.arguments]:
        found = [each for method in ("__init__", "__new__") for each in _named(node.body, method)]
        for each in found:
            if isinstance(each, ast.FunctionDef):
                yield _without_first(each.args)
        if found:
            return
        if any("dataclass" in ast.unparse(each) for each in node.decorator_list):
            yield _of_fields([*self._fields(name, node)])
            return
        for base in node.bases:
            for origin, definition in self._bases(name, base):
                yield from self._constructors(origin, definition)
                return

    def _fields(self, name: str, node: ast.ClassDef) -> Iterator[tuple[str, bool]]:
        for base in reversed(node.bases):
            for origin, definition in self._bases(name, base):
                yield from self._fields(origin, definition)
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                yield each.target.id, each.value is not None

    def _bases(self, name: str, base: ast.expr) -> Iterator[tuple[str, ast.ClassDef]]:
        """Yield the class that a base class is, with a name in its neighbourhood."""
        origin = name
        while origin and self._module(origin) is None:
            origin = origin.rpartition(".")[0]
        # a class that was imported into a package is looked up where it is defined
        for module in (self._home(name), origin):
            for each in self._definitions(f"{module}.{ast.unparse(base)}") if module else ():
                if isinstance(each, ast.ClassDef):
                    yield f"{module}.{ast.unparse(base)}", each
                    return

    def _home(self, name: str) -> str | None:
        """Return the module that defines a name, following imports."""
        owner, _, last = name.rpartition(".")
        if (module := self._module(owner)) is None:
            return None
        path, tree = module
        body = [*_statements(tree.body)]
        if _named(body, last):
            return owner
        for node in body:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    wanted = last if alias.name == "*" else alias.name if (alias.asname or alias.name) == last else None
                    if wanted is not None and (home := self._home(f"{_absolute(node, path)}.{wanted}")) is not None:
                        return home
        return None


def _stubs_of(owner: str, name: str) -> list[str]:
    """Return where torch's stubs have what a module takes from a C extension."""
    extensions = {"torch": "torch._C._VariableFunctions", "torch.nn.functional": "torch._C._nn"}
    return [f"{extensions[owner]}.{name}"] if owner in extensions else []


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, those of `if` and `try` and `with` too."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(node, part, []))
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _statements(handler.body)


def _named(body: list[ast.stmt], name: str) -> list[ast.stmt]:
    """Return definitions of a name: all overloads of a stub, otherwise the first, which is no stand-in for a missing import."""
    found = [each for each in body if isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name == name]
    overloads = [each for each in found if any("overload" in ast.unparse(mark) for mark in each.decorator_list)]
    return [*(overloads or found[:1])]


def _absolute(node: ast.ImportFrom, path: str) -> str:
    if node.level == 0:
        return node.module or ""
    package = PurePosixPath(path).parents[node.level - 1]
    return ".".join([*package.parts, *([node.module] if node.module else [])])


def _without_first(arguments: ast.arguments) -> ast.arguments:
    if arguments.posonlyargs:
        return ast.arguments(**{**vars(arguments), "posonlyargs": arguments.posonlyargs[1:]})
    return ast.arguments(**{**vars(arguments), "args": arguments.args[1:]})


def _of_fields(fields: list[tuple[str, bool]]) -> ast.arguments:
    by_name = dict(fields)
    defaults: list[ast.expr | None] = [ast.Constant(...) if has_default else None for has_default in by_name.values()]
    names = [ast.arg(arg=name) for name in by_name]
    return ast.arguments(posonlyargs=[], args=[], kwonlyargs=names, kw_defaults=defaults, defaults=[])


def _written(arguments: ast.arguments) -> str:
    """Write a signature without annotations, and with `...` for defaults."""
    for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if each is not None:
            each.annotation = None
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [None if each is None else ast.Constant(...) for each in arguments.kw_defaults]
    return ast.unparse(arguments)
