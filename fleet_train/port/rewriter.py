"""One pass over a script: old names become new ones as the table says; the rest is marked."""

from __future__ import annotations

from typing import cast

import libcst as cst

from fleet_train.port import special, training
from fleet_train.port.calls import HEADS, Undecided, call_of, dotted, outer_names, rewritten, shown, source
from fleet_train.port.facts import Meaning, Transformer, index, is_run
from fleet_train.port.index import FLEET, canonical, is_module, is_old
from fleet_train.port.rules import Rule, To, Todo
from fleet_train.port.table_programs import BUILD_FIELDS

_UNKNOWN = "no entry in the table: look for its equal in Paddle 3, which has no paddle.fluid"
_UNKNOWN_FLEET = "not in fleet_train: see docs/old-programs.md"


class Rewriter(Transformer):
    """Renames, and marks what it cannot rename."""

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        return self._reference(original_node, updated_node)

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        special.mark_block(self, original_node)
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
        return self._rewritten_name(original, updated, meaning, rule)

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
        """Whether a name refers to nothing: an attribute's, a keyword, or one that is being assigned."""
        if isinstance(parent, cst.Attribute):
            return parent.attr is node
        if isinstance(parent, (cst.Arg, cst.Param)):
            return node in (getattr(parent, "keyword", None), getattr(parent, "name", None))
        return isinstance(parent, (cst.AssignTarget, cst.FunctionDef, cst.ClassDef, cst.NameItem, cst.AsName)) and (
            isinstance(node, cst.Name)
        )

    def _rewritten_name(
        self, node: cst.CSTNode, updated: cst.BaseExpression, meaning: Meaning, rule: Rule | None
    ) -> cst.BaseExpression:
        """The new form of a name that is not called."""
        if isinstance(rule, To) and rule.is_drop_in:
            return self._renamed(node, updated, meaning, rule.new)
        what = shown(meaning.name)
        if rule is None and canonical(meaning.name).startswith(FLEET) and isinstance(updated, cst.Attribute):
            self.mark(node, what, _UNKNOWN_FLEET)
            front = self.meaning_of(cast("cst.Attribute", node).value)
            owner = canonical(front.name) if front else ""
            new = "fleet" if owner == FLEET.rstrip(".") else None
            return updated.with_changes(value=self._written(new)) if new else self._keep_name(updated, meaning)
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
        """The form of what stays by its old name; Fleet's own below the new ``fleet``, which says what it lacks."""
        name = canonical(meaning.name)
        if (
            name.startswith(FLEET)
            and name.count(".") == FLEET.count(".")
            and isinstance(updated, (cst.Attribute, cst.Name))
        ):
            last = name.rpartition(".")[2]
            return cst.Attribute(self._written("fleet"), cst.Name(last))
        return self._keep_name(updated, meaning)

    def _keep_name(self, updated: cst.BaseExpression, meaning: Meaning) -> cst.BaseExpression:
        self.keep(meaning)
        return updated

    def _renamed(
        self, node: cst.CSTNode, updated: cst.BaseExpression, meaning: Meaning, new: str
    ) -> cst.BaseExpression:
        if problem := self._why_not(node, meaning, new):
            self.mark(node, shown(meaning.name), problem)
            return self._keep_name(updated, meaning)
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
        updated_node = special.with_flags(self, original_node, updated_node)
        if meaning is not None and meaning.name == "fleet_train.fleet.place":
            special.mark_early_place(self, original_node)
        if meaning is not None:
            updated_node = special.with_parameters(self, original_node, updated_node, canonical(meaning.name))
        if meaning is None or rule is None:
            return special.of_any_object(self, original_node, updated_node)
        try:
            result = self._rewritten_call(original_node, updated_node, canonical(meaning.name), rule)
        except Undecided as undecided:
            hand = rule.hand or call_of(rule) if isinstance(rule, To) else rule.do
            self.mark(original_node, shown(meaning.name), f"{hand} ({undecided})" if str(undecided) else hand)
            return updated_node.with_changes(func=self._todo(updated_node.func, meaning))
        new = outer_names(result)
        for name in new:
            if problem := self._why_not(original_node, meaning, name):
                self.mark(original_node, shown(meaning.name), problem)
                return self._keep_name(updated_node, meaning)
        self.needed |= {name.partition(".")[0] for name in new}
        return result

    def _rewritten_call(self, original: cst.Call, updated: cst.Call, name: str, rule: Rule) -> cst.BaseExpression:
        """The new form of a call. Raises Undecided, without a text where the rule says all."""
        if name in special.CALLS:
            result = special.CALLS[name](self, original, updated)
            if result is not None:
                return result
        if not isinstance(rule, To):
            raise Undecided("see above" if name in special.CALLS else "")
        if rule.arguments is None:
            return updated.with_changes(func=dotted(rule.new))
        try:
            return rewritten(original, updated, rule)
        except Undecided:
            if not rule.otherwise:
                raise
            return updated.with_changes(func=dotted(rule.otherwise))

    # Truth

    def leave_IfExp(self, original_node: cst.IfExp, updated_node: cst.IfExp) -> cst.IfExp:
        return updated_node.with_changes(test=training.truth(self, original_node.test, updated_node.test))

    def leave_Assert(self, original_node: cst.Assert, updated_node: cst.Assert) -> cst.Assert:
        return updated_node.with_changes(test=training.truth(self, original_node.test, updated_node.test))

    def leave_CompIf(self, original_node: cst.CompIf, updated_node: cst.CompIf) -> cst.CompIf:
        return updated_node.with_changes(test=training.truth(self, original_node.test, updated_node.test))

    def leave_UnaryOperation(
        self, original_node: cst.UnaryOperation, updated_node: cst.UnaryOperation
    ) -> cst.BaseExpression:
        return training.negated(self, original_node, updated_node)

    def visit_BooleanOperation(self, node: cst.BooleanOperation) -> None:
        training.mark_choice(self, node)

    def visit_While(self, node: cst.While) -> None:
        training.mark_loop(self, node)

    # Fetches and rank guards

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> cst.Assign:
        targets = [target.target for target in original_node.targets]
        for kind in ("fetch list", "parameter list"):
            if any(self.holds(kind, target) for target in targets):
                special.mark_names(self, original_node, original_node.value, kind)
                return updated_node.with_changes(value=special.without_names(updated_node.value))
        training.mark_settings(self, original_node)
        for target in targets:
            self._mark_build_field(target)
            # os.environ["FLAGS_enable_pir_api"] = "0"
            if isinstance(target, cst.Subscript):
                changed = special.flag_set(self, original_node, index(target), updated_node.value)
                updated_node = updated_node.with_changes(value=changed)
        return updated_node

    def leave_DictElement(self, original_node: cst.DictElement, updated_node: cst.DictElement) -> cst.DictElement:
        """Rewrite ``paddle.set_flags({"FLAGS_enable_pir_api": 0})``."""
        changed = special.flag_set(self, original_node, source(original_node.key), updated_node.value)
        return updated_node.with_changes(value=changed)

    def _mark_build_field(self, target: cst.BaseExpression) -> None:
        """Mark a field that a BuildStrategy of today does not have; ours, in fleet scripts, knows the old ones."""
        if self.facts.is_fleet_script or not isinstance(target, cst.Attribute) or target.attr.value in BUILD_FIELDS:
            return
        if self.holds("build strategy", target.value):
            self.mark(target, f"BuildStrategy.{target.attr.value}", "delete the line: Paddle 3 has no such field")

    def leave_Subscript(self, original_node: cst.Subscript, updated_node: cst.Subscript) -> cst.Subscript:
        """Rewrite ``loss_now[0]`` of a fetched value, perhaps a scalar: 1.x gave it a dimension, today it has none."""
        assigned = isinstance(self.parent_of(original_node), (cst.AssignTarget, cst.AugAssign, cst.AnnAssign, cst.Del))
        if index(original_node) != "0" or assigned or self.facts.makes_old_executor:
            return updated_node
        value = special.without_array(original_node.value)
        fetched = self.holds("fetched value", value)
        if isinstance(value, cst.Subscript) and index(value).lstrip("-").isdigit():
            fetched = is_run(value.value) or self.holds("fetched values", value.value)
        if not fetched:
            return updated_node
        numpy, scope = self.facts.numpy, self.scope_of(original_node)
        bound = numpy and scope is not None and scope[numpy]
        if not bound or not self.means_only(numpy, original_node, lambda name: name == "numpy"):
            self.mark(
                original_node,
                f"`{source(original_node)}` of a fetched value",
                f"{source(value)}.item() for a scalar: it has no dimension today",
            )
            return updated_node
        return updated_node.with_changes(value=cst.Call(dotted(f"{numpy}.atleast_1d"), [cst.Arg(updated_node.value)]))

    def leave_If(
        self, original_node: cst.If, updated_node: cst.If
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        updated_node = updated_node.with_changes(test=training.truth(self, original_node.test, updated_node.test))
        if not self.facts.is_fleet_script:
            return updated_node
        if not isinstance(self.parent_of(original_node), cst.If):  # an elif belongs to its if
            result = special.opened(updated_node)
            if result is not None:
                return result
        if special.hides_a_save(updated_node):
            self.mark(original_node, *special.SAVE_BY_HAND)
        return updated_node
