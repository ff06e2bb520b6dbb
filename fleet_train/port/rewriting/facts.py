"""Facts about a whole script that are needed to rewrite one of its lines."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import libcst as cst
from libcst.metadata import Assignment, PositionProvider, Scope, ScopeProvider

from fleet_train.port.rewriting.calls import source
from fleet_train.port.rewriting.names import Meaning, meaning_of
from fleet_train.port.tables.index import FLUID, canonical, is_fleet


@dataclass
class Facts:
    """One script."""

    is_fleet_script: bool = False
    is_fluid_script: bool = False
    """Imports ``paddle.fluid``: of 1.x, in which programs were static unless a script said otherwise."""
    uses_paddle: bool = False
    is_dynamic: bool = False
    enables_static: bool = False
    fetch_lists: set[tuple[int, str]] = field(default_factory=set)
    """(id of the defining scope, name) of lists that are passed to fetch_list=."""
    fetched: set[tuple[int, str]] = field(default_factory=set)
    """The same for names that receive one fetched value."""
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

    def visit_Attribute(self, node: cst.Attribute) -> None:
        meaning = self._meaning(node)
        name = canonical(meaning.name) if meaning else ""
        self.facts.is_dynamic |= name.startswith(("paddle.fluid.dygraph", "paddle.fluid.enable_dygraph"))
        self.facts.is_dynamic |= name == "paddle.disable_static"

    def visit_Assign(self, node: cst.Assign) -> None:
        if not is_run(node.value):
            return
        for target in node.targets:
            if isinstance(target.target, (cst.Tuple, cst.List)):
                for element in target.target.elements:
                    self._remember(self.facts.fetched, element.value)

    def _remember(self, found: set[tuple[int, str]], node: cst.BaseExpression) -> None:
        scope = self._scope(node)
        if isinstance(node, cst.Name) and scope is not None:
            found |= defining_scopes(node.value, scope)


def is_run(node: cst.BaseExpression) -> bool:
    """Whether this is ``something.run(..., fetch_list=...)``."""
    return (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Attribute)
        and node.func.attr.value == "run"
        and any(one.keyword is not None and one.keyword.value == "fetch_list" for one in node.args)
    )


def defining_scopes(name: str, scope: Scope) -> set[tuple[int, str]]:
    """(id of scope, name) wherever the variable that ``name`` is here is assigned."""
    bindings: Collection[object] = scope[name]
    return {(id(one.scope), name) for one in bindings if isinstance(one, Assignment)}
