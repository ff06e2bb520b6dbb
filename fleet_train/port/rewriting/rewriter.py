"""One pass over a script: old names become new ones as the table says; the rest is marked."""

from __future__ import annotations

from typing import cast

import libcst as cst

from fleet_train.port.rewriting import environment, fetches, guards, methods, special
from fleet_train.port.rewriting.calls import Undecided, dotted, rewritten, source
from fleet_train.port.rewriting.facts import index, is_run
from fleet_train.port.rewriting.heads import HEADS, call_of, outer_names, shown
from fleet_train.port.rewriting.names import Meaning, means_only
from fleet_train.port.rewriting.transformer import Transformer
from fleet_train.port.tables.index import FLEET, canonical, is_module, is_old
from fleet_train.port.tables.programs import BUILD_FIELDS
from fleet_train.port.tables.rules import Rule, To, Todo

_UNKNOWN = "no entry in the table: look for its equal in Paddle 3, which has no paddle.fluid"
_UNKNOWN_FLEET = "not in fleet_train: see docs/old-programs.md"


class Rewriter(Transformer):
    """Renames, and marks what it cannot rename."""

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        return self._reference(original_node, updated_node)

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        if self.facts.uses_paddle:
            methods.mark_block(self, original_node)
        return self._reference(original_node, updated_node)

    def visit_Import(self, node: cst.Import) -> bool:  # noqa: ARG002
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        if isinstance(node.names, cst.ImportStar) and node.module and is_old(source(node.module)):
            self.mark(node, f"from {source(node.module)} import *", "import by name what is used, and port again")
        return False

    def _reference(self, original: cst.Name | cst.Attribute, updated: cst.Name | cst.Attribute) -> cst.BaseExpression:
        parent = self.parent_of(original)
        if self._is_no_reference(original, parent) or self._site_of(original) is not original:
            return updated
        meaning, rule = self.meaning_of(original), self.rule_of(original)
        if meaning is None or (isinstance(parent, cst.Call) and parent.func is original and rule is not None):
            return updated  # leave_Call sees it with its arguments
        return self._referred(original, updated, meaning, rule)

    def _site_of(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """The part of the whole chain of names around ``node`` that a row is about, or that no row knows."""
        while isinstance(parent := self.parent_of(node), cst.Attribute) and parent.value is node:
            node = parent
        unknown: cst.CSTNode | None = None
        whole = node
        while True:
            if self.rule_of(node) is not None:
                return node
            meaning = self.meaning_of(node)
            if meaning is not None and is_old(meaning.name) and not is_module(meaning.name):
                unknown = node
            if not isinstance(node, cst.Attribute):
                break
            node = node.value
        meaning = self.meaning_of(whole)
        return unknown or (whole if meaning is not None and is_old(meaning.name) else None)

    def _is_no_reference(self, node: cst.CSTNode, parent: cst.CSTNode) -> bool:
        """Attribute names, keywords, and names that are being assigned."""
        if isinstance(parent, cst.Attribute):
            return parent.attr is node
        if isinstance(parent, (cst.Arg, cst.Param)):
            return node in (getattr(parent, "keyword", None), getattr(parent, "name", None))
        return isinstance(parent, (cst.AssignTarget, cst.FunctionDef, cst.ClassDef, cst.NameItem, cst.AsName)) and (
            isinstance(node, cst.Name)
        )

    def _referred(
        self, node: cst.CSTNode, updated: cst.BaseExpression, meaning: Meaning, rule: Rule | None
    ) -> cst.BaseExpression:
        """A name that is not called."""
        if isinstance(rule, To) and rule.takes_the_same:
            return self._renamed(node, updated, meaning, rule.new)
        what = shown(meaning.name)
        if rule is None and canonical(meaning.name).startswith(FLEET) and isinstance(updated, cst.Attribute):
            self.mark(node, what, _UNKNOWN_FLEET)
            front = self.meaning_of(cast("cst.Attribute", node).value)
            owner = canonical(front.name) if front else ""
            new = "fleet" if owner == FLEET.rstrip(".") else None
            return updated.with_changes(value=self._written(new)) if new else self._stays(updated, meaning)
        if isinstance(rule, Todo):
            self.mark(node, what, rule.do)
        elif isinstance(rule, To):
            self.mark(node, what, f"{call_of(rule)}: its arguments differ, so it cannot be handed on by name")
        elif is_module(meaning.name):
            self.mark(node, what, "write the functions that are used by their full names, and port again")
        else:
            self.mark(node, what, _UNKNOWN)
        return self._todo(updated, meaning)

    def _todo(self, updated: cst.BaseExpression, meaning: Meaning) -> cst.BaseExpression:
        """What stays by its old name; of Fleet's, below the new ``fleet``, which says what it does not have."""
        name = canonical(meaning.name)
        if (
            name.startswith(FLEET)
            and name.count(".") == FLEET.count(".")
            and isinstance(updated, (cst.Attribute, cst.Name))
        ):
            last = name.rpartition(".")[2]
            return cst.Attribute(self._written("fleet"), cst.Name(last))
        return self._stays(updated, meaning)

    def _stays(self, updated: cst.BaseExpression, meaning: Meaning) -> cst.BaseExpression:
        self.keep(meaning)
        return updated

    def _renamed(
        self, node: cst.CSTNode, updated: cst.BaseExpression, meaning: Meaning, new: str
    ) -> cst.BaseExpression:
        if problem := self._why_not(node, meaning, new):
            self.mark(node, shown(meaning.name), problem)
            return self._stays(updated, meaning)
        return self._written(new)

    def _why_not(self, node: cst.CSTNode, meaning: Meaning, new: str) -> str | None:
        """Why a certain row cannot be written at this place."""
        if not meaning.certain:
            return f"{new}, if it is what this name stands for: it is also bound to something else"
        head = new.partition(".")[0]
        if head in HEADS and not self.may_write(head, node):
            return f"{new}: `{head}` is the name of something else here; rename that, and port again"
        return None

    def _written(self, new: str) -> cst.BaseExpression:
        self.needed.add(new.partition(".")[0])
        return dotted(new)

    # Calls

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        meaning = self.meaning_of(original_node.func)
        rule = self.rule_of(original_node.func)
        updated_node = environment.on_in_call(self, original_node, updated_node)
        if meaning is not None:
            updated_node = methods.with_parameters(self, original_node, updated_node, canonical(meaning.name))
        if meaning is None or rule is None:
            return methods.rewritten(self, original_node, updated_node)
        if isinstance(rule, Todo) and canonical(meaning.name) not in special.CALLS:
            self.mark(original_node, shown(meaning.name), rule.do)
            return updated_node.with_changes(func=self._todo(updated_node.func, meaning))
        try:
            return self._call(original_node, updated_node, meaning, rule)
        except Undecided as undecided:
            hand = rule.hand or call_of(rule) if isinstance(rule, To) else rule.do
            self.mark(original_node, shown(meaning.name), f"{hand} ({undecided})")
            return updated_node.with_changes(func=self._todo(updated_node.func, meaning))

    def _call(self, original: cst.Call, updated: cst.Call, meaning: Meaning, rule: Rule) -> cst.BaseExpression:
        special_case = special.CALLS.get(canonical(meaning.name))
        if special_case is not None:
            result = special_case(self, original, updated)
            if result is not None:
                return self._checked(original, updated, meaning, result)
        if not isinstance(rule, To):
            raise Undecided("see above")
        if rule.arguments is None:
            return self._checked(original, updated, meaning, updated.with_changes(func=dotted(rule.new)))
        try:
            result = rewritten(original, updated, rule)
        except Undecided:
            if not rule.otherwise:
                raise
            result = updated.with_changes(func=dotted(rule.otherwise))
        return self._checked(original, updated, meaning, result)

    def _checked(
        self, original: cst.Call, updated: cst.Call, meaning: Meaning, result: cst.BaseExpression
    ) -> cst.BaseExpression:
        """``result``, unless one of the names that it needs means something else here."""
        new = outer_names(result)
        for name in new:
            if problem := self._why_not(original, meaning, name):
                self.mark(original, shown(meaning.name), problem)
                return self._stays(updated, meaning)
        self.needed |= {name.partition(".")[0] for name in new}
        return result

    # Fetches and rank guards

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> cst.Assign:
        targets = [target.target for target in original_node.targets]
        fetched = any(self.names_one_of(self.facts.fetch_lists, target) for target in targets)
        learned = any(self.names_one_of(self.facts.parameter_lists, target) for target in targets)
        if fetched:
            for text in fetches.texts_in(original_node.value):
                self.mark(original_node, f"fetching {text}", "fetch the Python variable: values have no names today")
        elif learned:
            methods.mark_parameters(self, original_node, original_node.value)
        if fetched or learned:
            return updated_node.with_changes(value=fetches.without_names(updated_node.value))
        for target in targets:
            self._mark_build_field(target)
        return environment.on_in_assignment(self, original_node, updated_node)

    def leave_DictElement(self, original_node: cst.DictElement, updated_node: cst.DictElement) -> cst.DictElement:
        return environment.on_in_dictionary(self, original_node, updated_node)

    def _mark_build_field(self, target: cst.BaseExpression) -> None:
        """A field that a BuildStrategy of today does not have; ours, in fleet scripts, knows the old ones."""
        if self.facts.is_fleet_script or not isinstance(target, cst.Attribute) or target.attr.value in BUILD_FIELDS:
            return
        if self.names_one_of(self.facts.build_strategies, target.value):
            self.mark(target, f"BuildStrategy.{target.attr.value}", "delete the line: Paddle 3 has no such field")

    def leave_Subscript(self, original_node: cst.Subscript, updated_node: cst.Subscript) -> cst.Subscript:
        """``loss_now[0]`` of a fetched value, which may be a scalar: 1.x gave it one dimension, today it has none."""
        if not self.facts.uses_paddle or index(original_node) != "0" or self._is_assigned(original_node):
            return updated_node
        value = methods.without_array(original_node.value)
        fetched = self.names_one_of(self.facts.fetched, value)
        if isinstance(value, cst.Subscript) and index(value).isdigit():
            fetched = is_run(value.value) or self.names_one_of(self.facts.all_fetched, value.value)
        if not fetched:
            return updated_node
        numpy, scope = self.facts.numpy, self.scope_of(original_node)
        if (
            not numpy
            or scope is None
            or not scope[numpy]
            or not means_only(numpy, "numpy", original_node, self.scope_of, lambda _: False)
        ):
            self._mark_fetched(original_node, source(value))
            return updated_node
        return updated_node.with_changes(value=cst.Call(dotted(f"{numpy}.atleast_1d"), [cst.Arg(updated_node.value)]))

    def _is_assigned(self, node: cst.Subscript) -> bool:
        return isinstance(self.parent_of(node), (cst.AssignTarget, cst.AugAssign, cst.AnnAssign, cst.Del))

    def _mark_fetched(self, node: cst.Subscript, value: str) -> None:
        self.mark(
            node, f"`{source(node)}` of a fetched value", f"{value}.item() for a scalar: it has no dimension today"
        )

    def leave_If(
        self, original_node: cst.If, updated_node: cst.If
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        if not self.facts.is_fleet_script:
            return updated_node
        if not isinstance(self.parent_of(original_node), cst.If):  # an elif belongs to its if
            result = guards.opened(updated_node)
            if result is not None:
                return result
        if guards.hides_a_save(updated_node):
            self.mark(original_node, *guards.BY_HAND)
        return updated_node
