"""Facts about a whole script that are needed to rewrite one of its lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import libcst as cst
from libcst.metadata import Assignment, ImportAssignment, PositionProvider, Scope, ScopeProvider

from fleet_train.port.calls import source
from fleet_train.port.index import FLUID, canonical, is_fleet

_BUILD_STRATEGIES = ("paddle.fluid.BuildStrategy", "paddle.static.BuildStrategy")
_PARAMETERS = ("parameters", "parameter_list", "no_grad_set")


@dataclass
class Facts:
    """One script."""

    is_fleet_script: bool = False
    is_fluid_script: bool = False
    """Imports ``paddle.fluid``: of 1.x, in which programs were static unless a script said otherwise."""
    uses_paddle: bool = False
    is_dynamic: bool = False
    enables_static: bool = False
    numpy: str = ""
    """The name by which the module knows numpy."""
    fetch_lists: set[tuple[int, str]] = field(default_factory=set)
    """(id of the defining scope, name) of lists that are passed to fetch_list=."""
    parameter_lists: set[tuple[int, str]] = field(default_factory=set)
    """The same for lists of parameters that optimizers are given."""
    fetched: set[tuple[int, str]] = field(default_factory=set)
    """The same for names that receive one fetched value."""
    all_fetched: set[tuple[int, str]] = field(default_factory=set)
    """The same for names that receive the list of fetched values."""
    blocks: set[tuple[int, str]] = field(default_factory=set)
    """The same for names of blocks of programs."""
    build_strategies: set[tuple[int, str]] = field(default_factory=set)
    init_lines: list[tuple[int, int]] = field(default_factory=list)
    """(id of the scope, line) of each call of fleet.init."""


class FactFinder(cst.CSTVisitor):
    """Fills `Facts`."""

    METADATA_DEPENDENCIES = (ScopeProvider, PositionProvider)

    def __init__(self) -> None:
        super().__init__()
        self.facts = Facts()

    def _scope(self, node: cst.CSTNode) -> Scope | None:
        return self.get_metadata(ScopeProvider, node, None)

    def _meaning(self, node: cst.CSTNode) -> Meaning | None:
        return meaning_of(node, self._scope)

    def visit_Import(self, node: cst.Import) -> None:
        for alias in node.names:
            self._imported(alias.evaluated_name)
            if alias.evaluated_name == "numpy":
                self.facts.numpy = alias.evaluated_alias or "numpy"

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        module = source(node.module) if node.module and not node.relative else ""
        if isinstance(node.names, cst.ImportStar):
            self._imported(module)
            return
        for alias in node.names:
            self._imported(f"{module}.{alias.evaluated_name}")

    def _imported(self, name: str) -> None:
        self.facts.uses_paddle |= name.split(".")[0] in {"paddle", "fleetx"}
        self.facts.is_fluid_script |= f"{name}.".startswith(FLUID)
        self.facts.is_fleet_script |= is_fleet(name) or name == "fleet_train.fleet"

    def visit_Call(self, node: cst.Call) -> None:
        meaning = self._meaning(node.func)
        name = canonical(meaning.name) if meaning else ""
        if name == "paddle.enable_static":
            self.facts.enables_static = True
        if name == "paddle.distributed.fleet.init":
            line = self.get_metadata(PositionProvider, node).start.line
            self.facts.init_lines.append((id(self._scope(node)), line))
        for argument in node.args:
            if argument.keyword is not None and argument.keyword.value == "fetch_list":
                self._remember(self.facts.fetch_lists, argument.value)
        for argument in parameter_arguments(node, name):
            self._remember(self.facts.parameter_lists, argument.value)

    def visit_Attribute(self, node: cst.Attribute) -> None:
        meaning = self._meaning(node)
        name = canonical(meaning.name) if meaning else ""
        self.facts.is_dynamic |= name.startswith(("paddle.fluid.dygraph", "paddle.fluid.enable_dygraph"))
        self.facts.is_dynamic |= name == "paddle.disable_static"

    def visit_Assign(self, node: cst.Assign) -> None:
        found = self._kind_of(node.value)
        for target in node.targets:
            elements = target.target.elements if isinstance(target.target, (cst.Tuple, cst.List)) else ()
            if found is self.facts.all_fetched:
                for element in elements:
                    self._remember(self.facts.fetched, element.value)
            if found is not None:
                self._remember(found, target.target)

    def _kind_of(self, value: cst.BaseExpression) -> set[tuple[int, str]] | None:
        """The set of names that one which is given ``value`` belongs to."""
        if is_run(value):
            return self.facts.all_fetched
        if isinstance(value, cst.Subscript) and index(value).isdigit():
            whole = is_run(value.value) or self.names_one_of(self.facts.all_fetched, value.value)
            return self.facts.fetched if whole else None
        if is_block(value):
            return self.facts.blocks
        meaning = self._meaning(value.func) if isinstance(value, cst.Call) else None
        name = canonical(meaning.name) if meaning else ""
        return self.facts.build_strategies if name in _BUILD_STRATEGIES else None

    def names_one_of(self, found: set[tuple[int, str]], node: cst.BaseExpression) -> bool:
        return names_one_of(found, node, self._scope(node))

    def _remember(self, found: set[tuple[int, str]], node: cst.BaseExpression) -> None:
        scope = self._scope(node)
        if isinstance(node, cst.Name) and scope is not None:
            found |= defining_scopes(node.value, scope)


def names_one_of(found: set[tuple[int, str]], node: cst.BaseExpression, scope: Scope | None) -> bool:
    """Whether a node is a name of which a fact is known."""
    return isinstance(node, cst.Name) and scope is not None and bool(defining_scopes(node.value, scope) & found)


def is_run(node: cst.BaseExpression) -> bool:
    """Whether this is ``something.run(..., fetch_list=...)``, or ``something.run(program, feed, [...])``."""
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute) or node.func.attr.value != "run":
        return False
    if any(one.keyword is not None and one.keyword.value == "fetch_list" for one in node.args):
        return True
    plain = [one for one in node.args if one.keyword is None and not one.star]
    return len(plain) > 2 and isinstance(plain[2].value, (cst.List, cst.Tuple))


def is_block(node: cst.BaseExpression) -> bool:
    """Whether this is ``program.global_block()`` or its like."""
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
        return False
    method = node.func.attr.value
    if method == "block":
        return bool(re.search(r"program(\(\))?$", source(node.func.value)))
    return method in ("global_block", "current_block")


def index(node: cst.Subscript) -> str:
    """The source text of a single index."""
    if len(node.slice) != 1 or not isinstance(node.slice[0].slice, cst.Index):
        return ""
    return source(node.slice[0].slice.value)


def parameter_arguments(call: cst.Call, name: str) -> list[cst.Arg]:
    """The arguments of a call that list parameters: of ``minimize`` and of what Paddle has under ``name``."""
    minimizes = isinstance(call.func, cst.Attribute) and call.func.attr.value == "minimize"
    if not minimizes and not name.startswith("paddle."):
        return []
    found = [one for one in call.args if one.keyword is not None and one.keyword.value in _PARAMETERS]
    plain = [one for one in call.args if one.keyword is None and not one.star]
    return found + (plain[2:4] if minimizes else [])


def defining_scopes(name: str, scope: Scope) -> set[tuple[int, str]]:
    """(id of scope, name) wherever the variable that ``name`` is here is assigned."""
    bindings: Collection[object] = scope[name]
    return {(id(one.scope), name) for one in bindings if isinstance(one, Assignment)}


# Resolves names in a script: follows import aliases, detects shadowing.


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
