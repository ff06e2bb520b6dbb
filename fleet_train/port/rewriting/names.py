"""Resolves names in a script: follows import aliases, detects shadowing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import ImportAssignment, Scope

ScopeOf = Callable[[cst.CSTNode], Scope | None]


@dataclass(frozen=True)
class Meaning:
    """The full name of an imported thing, and the import that brings it."""

    name: str
    imports: tuple[ImportAssignment, ...]
    certain: bool
    """False where the name may also be bound to something else."""


def parts_of(node: cst.CSTNode) -> list[str]:
    """``["fluid", "layers", "fc"]`` for ``fluid.layers.fc``; empty for anything but a chain of names."""
    if isinstance(node, cst.Name):
        return [node.value]
    if isinstance(node, cst.Attribute):
        front = parts_of(node.value)
        return [*front, node.attr.value] if front else []
    return []


def root_of(node: cst.CSTNode) -> cst.CSTNode:
    """The leftmost name of a chain."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return node


def meaning_of(node: cst.CSTNode, scope_of: ScopeOf) -> Meaning | None:
    """The full name of a chain of names; None if it does not come from an import."""
    parts = parts_of(node)
    scope = scope_of(root_of(node)) if parts else None
    if scope is None:
        return None
    bindings = scope[parts[0]]
    imports = [one for one in bindings if isinstance(one, ImportAssignment)]
    names = {name.name for one in imports for name in one.get_qualified_names_for(".".join(parts))}
    if not names:
        return None
    return Meaning(min(names), tuple(imports), len(names) == 1 and len(imports) == len(bindings))


def means_only(head: str, module: str, node: cst.CSTNode, scope_of: ScopeOf, imported: Callable[[str], bool]) -> bool:
    """Whether ``head`` at ``node`` is free, or an import of ``module`` or of what ``imported`` accepts."""
    scope = scope_of(node)
    for one in scope[head] if scope is not None else ():
        if not isinstance(one, ImportAssignment):
            return False
        names = {name.name for name in one.get_qualified_names_for(head)}
        if not all(name == module or imported(name) for name in names):
            return False
    return True
