"""Queries of every rewriting step about the script around a node, and the marks that it adds there."""

from __future__ import annotations

from typing import Any

import libcst as cst
from libcst.metadata import ParentNodeProvider, PositionProvider, Scope, ScopeProvider

from fleet_train.port.rewriting import marks
from fleet_train.port.rewriting.facts import Facts, names_one_of
from fleet_train.port.rewriting.heads import HEADS, brings
from fleet_train.port.rewriting.names import Meaning, meaning_of, means_only
from fleet_train.port.tables.index import is_old, rule_of
from fleet_train.port.tables.rules import Rule


class Transformer(cst.CSTTransformer):
    """``needed``: first parts of the names written. ``kept``: (import statement, bound name) that marked uses need."""

    METADATA_DEPENDENCIES = (ScopeProvider, ParentNodeProvider, PositionProvider)

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self.facts = facts
        self.needed: set[str] = set()
        self.kept: set[tuple[cst.CSTNode, str]] = set()
        self._comments: dict[cst.CSTNode, list[str]] = {}

    # What the tree knows

    def scope_of(self, node: cst.CSTNode) -> Scope | None:
        return self.get_metadata(ScopeProvider, node, None)

    def line_of(self, node: cst.CSTNode) -> int:
        return self.get_metadata(PositionProvider, node).start.line

    def parent_of(self, node: cst.CSTNode) -> cst.CSTNode:
        return self.get_metadata(ParentNodeProvider, node)

    def meaning_of(self, node: cst.CSTNode) -> Meaning | None:
        return meaning_of(node, self.scope_of)

    def rule_of(self, node: cst.CSTNode) -> Rule | None:
        meaning = self.meaning_of(node)
        return rule_of(meaning.name, self.facts.is_fleet_script) if meaning else None

    def names_one_of(self, found: set[tuple[int, str]], node: cst.BaseExpression) -> bool:
        """Whether a node is a name of which a fact is known."""
        return names_one_of(found, node, self.scope_of(node))

    def may_write(self, head: str, node: cst.CSTNode) -> bool:
        """Whether ``head`` means at ``node`` what our imports bind to it."""
        return means_only(head, HEADS[head], node, self.scope_of, brings(head))

    # Marks

    def mark(self, node: cst.CSTNode, what: str, do: str) -> None:
        """A TODO line above the statement that ``node`` is in."""
        while not hasattr(node, "leading_lines") or isinstance(node, cst.Decorator):
            node = self.parent_of(node)
        self._comments.setdefault(node, []).append(marks.comment(what, do))

    def keep(self, meaning: Meaning) -> None:
        """The imports behind an old name that stays."""
        if is_old(meaning.name):
            self.kept |= {(one.node, one.name) for one in meaning.imports}

    def visit_Module(self, node: cst.Module) -> None:
        self._first = (node.body[0], node.header) if node.body else None

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        result = super().on_leave(original_node, updated_node)
        comments = self._comments.get(original_node)
        if comments and self._first is not None and original_node is self._first[0]:
            comments = marks.not_in(self._first[1], comments)
        if not comments or not isinstance(result, (cst.CSTNode, cst.FlattenSentinel)):
            return result
        if isinstance(result, cst.FlattenSentinel):
            first, *others = result
            return cst.FlattenSentinel([_commented(first, comments), *others])
        return _commented(result, comments)


def _commented(node: Any, comments: list[str]) -> Any:
    return node.with_changes(leading_lines=marks.with_marks(node.leading_lines, comments))
