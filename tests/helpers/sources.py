"""What Python sources define, read without importing them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True, eq=False)
class Found:
    """A definition, or a module, and the module that it stands in."""

    module: str
    node: Any


class Sources:
    """The modules below some folders."""

    def __init__(self, *folders: Path) -> None:
        self.folders = folders
        self.find = cache(self._find)
        self.members = cache(self._members)

    def module(self, name: str) -> Found | None:
        for folder in self.folders:
            place = folder.joinpath(*name.split("."))
            for file in (place / "__init__.py", place.with_suffix(".py")):
                if file.is_file():
                    return Found(name, _tree(file))
        return None

    def _find(self, module: str, path: str) -> Found | None:
        """Return the definition of ``Name``, ``Class.member`` or a module, through imports."""
        own = self.module(module)
        first, _, member = path.partition(".")
        if own is None:
            return None
        found = None
        for node in _statements(own.node):  # the last one: it follows overloads
            if isinstance(node, ast.ImportFrom):
                found = self._imported(own, node, first) or found
            elif first in _names(node):
                found = Found(module, node)
        found = found or self.module(f"{module}.{first}")
        if found is None or not member:
            return found
        return self.members(found).get(member)

    def _imported(self, own: Found, node: ast.ImportFrom, name: str) -> Found | None:
        source = node.module or ""
        if node.level:
            is_package = self.module(f"{own.module}.__init__") is not None
            parents = own.module.split(".")
            parents = parents[: len(parents) - node.level + is_package]
            source = ".".join([*parents, *([source] if source else [])])
        for alias in node.names:
            if alias.name == "*":
                return self.find(source, name)
            if name == (alias.asname or alias.name) and source != own.module:
                return self.find(source, alias.name)
        return None

    def lineage(self, own: Found) -> list[Found]:
        """Return a class and those that it inherits from, the next one first."""
        order = [own]
        for base in own.node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            found = self.find(own.module, ast.unparse(plain))
            if found is not None and isinstance(found.node, ast.ClassDef):
                order += self.lineage(found)
        # a class comes behind all that are made of it
        last = {one.node: one for one in reversed(order)}
        return [*last.values()][::-1]

    def _members(self, own: Found) -> dict[str, Found]:
        """Return what a class, or the class of an object, defines and inherits."""
        node = own.node
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = self.find(own.module, ast.unparse(node.value.func))
            return {} if made is None else self.members(made)
        if not isinstance(node, ast.ClassDef):
            return {}
        members: dict[str, Found] = {}
        for one in reversed(self.lineage(own)):
            for name, member in defined_in(one.node):
                members[name] = Found(one.module, member)
        return members


def defined_in(owner: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    """Yield the members of a class, and the attributes that its methods set."""
    for node in ast.walk(owner):
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and ast.unparse(node.value) == "self":
            yield node.attr, node
    for node in _statements(owner):
        for name in _names(node):
            yield name, node


def parameters(function: Any) -> set[str]:
    """Return the names of a function's parameters, ``**`` for any others."""
    own = function.args
    names = {one.arg for one in (*own.posonlyargs, *own.args, *own.kwonlyargs)}
    return names | ({"**"} if own.kwarg else set())


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _statements(scope: Any) -> Iterator[Any]:
    """Yield what a module or a class holds, without what its functions and classes do."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, SCOPES):
            yield from _statements(node)


def _names(node: Any) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, SCOPES[:3]):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]
