"""One pass over a script: old names become new ones as the table says; the rest is marked."""

from __future__ import annotations

import re
from typing import cast

import libcst as cst

from fleet_train.port import methods, transformer
from fleet_train.port.calls import HEADS, Undecided, call_of, dotted, outer_names, rewritten, shown, source
from fleet_train.port.facts import Meaning, index, is_run, means_only
from fleet_train.port.index import FLEET, canonical, is_module, is_old
from fleet_train.port.rules import Rule, To, Todo
from fleet_train.port.table_programs import BUILD_FIELDS
from fleet_train.port.transformer import Transformer

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
        updated_node = _flag_in_call(self, original_node, updated_node)
        if meaning is not None:
            updated_node = methods.with_parameters(self, original_node, updated_node, canonical(meaning.name))
        if meaning is None or rule is None:
            return methods.rewritten(self, original_node, updated_node)
        if isinstance(rule, Todo) and canonical(meaning.name) not in transformer.CALLS:
            self.mark(original_node, shown(meaning.name), rule.do)
            return updated_node.with_changes(func=self._todo(updated_node.func, meaning))
        try:
            return self._call(original_node, updated_node, meaning, rule)
        except Undecided as undecided:
            hand = rule.hand or call_of(rule) if isinstance(rule, To) else rule.do
            self.mark(original_node, shown(meaning.name), f"{hand} ({undecided})")
            return updated_node.with_changes(func=self._todo(updated_node.func, meaning))

    def _call(self, original: cst.Call, updated: cst.Call, meaning: Meaning, rule: Rule) -> cst.BaseExpression:
        special_case = transformer.CALLS.get(canonical(meaning.name))
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
            for text in methods.texts_in(original_node.value):
                self.mark(original_node, f"fetching {text}", "fetch the Python variable: values have no names today")
        elif learned:
            methods.mark_parameters(self, original_node, original_node.value)
        if fetched or learned:
            return updated_node.with_changes(value=methods.without_names(updated_node.value))
        for target in targets:
            self._mark_build_field(target)
        return _flag_in_assignment(self, original_node, updated_node)

    def leave_DictElement(self, original_node: cst.DictElement, updated_node: cst.DictElement) -> cst.DictElement:
        return _flag_in_dictionary(self, original_node, updated_node)

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
            result = _opened(updated_node)
            if result is not None:
                return result
        if _hides_a_save(updated_node):
            self.mark(original_node, *_SAVE_BY_HAND)
        return updated_node


# Without PIR nothing of this package works: what switched it off switches it on.
_FLAG = "FLAGS_enable_pir_api"
_ON = {
    "0": "1",
    "False": "True",
    **{f"{quote}{off}{quote}": f"{quote}1{quote}" for quote in "'\"" for off in ("0", "False", "false")},
}
_SETTERS = ("setdefault", "putenv")


def _flag_in_assignment(script: Transformer, original: cst.Assign, updated: cst.Assign) -> cst.Assign:
    """``os.environ["FLAGS_enable_pir_api"] = "0"``."""
    targets = [target.target for target in original.targets]
    if not any(isinstance(target, cst.Subscript) and _is_pir_flag(index(target)) for target in targets):
        return updated
    return updated.with_changes(value=_switched_on(script, original, updated.value))


def _flag_in_dictionary(script: Transformer, original: cst.DictElement, updated: cst.DictElement) -> cst.DictElement:
    """``paddle.set_flags({"FLAGS_enable_pir_api": 0})``."""
    return (
        updated.with_changes(value=_switched_on(script, original, updated.value))
        if _is_pir_flag(source(original.key))
        else updated
    )


def _flag_in_call(script: Transformer, original: cst.Call, updated: cst.Call) -> cst.Call:
    """``os.environ.setdefault("FLAGS_enable_pir_api", "0")``, ``os.environ.update(FLAGS_enable_pir_api="0")``."""
    first = original.args[0].value if len(original.args) == 2 else None
    sets = (
        isinstance(original.func, cst.Attribute)
        and original.func.attr.value in _SETTERS
        and isinstance(first, cst.SimpleString)
        and _is_pir_flag(first.value)
    )
    arguments = [
        new.with_changes(value=_switched_on(script, original, new.value))
        if (sets and position == 1) or (old.keyword is not None and old.keyword.value == _FLAG)
        else new
        for position, (old, new) in enumerate(zip(original.args, updated.args, strict=True))
    ]
    return updated.with_changes(args=arguments)


def _is_pir_flag(text: str) -> bool:
    return text in (f'"{_FLAG}"', f"'{_FLAG}'")


def _switched_on(script: Transformer, node: cst.CSTNode, value: cst.BaseExpression) -> cst.BaseExpression:
    text = source(value)
    if text in _ON:
        return cst.parse_expression(_ON[text])
    if text not in _ON.values() and text.strip("'\"").lower() != "true":
        script.mark(node, f"{_FLAG}={text}", "leave it on: programs of the old IR are not supported")
    return value


# `if fleet.worker_index() == 0:` around a save, which is a collective call in which only rank 0 writes.
_RANK = re.compile(
    r"(fleet\.(worker_index|rank)\(\)|(\w+\.)*(trainer_id|rank|worker_index|worker_id)(\(\))?"
    r"|int\(os\.(environ|getenv).*PADDLE_TRAINER_ID.*\))"
)
_ABOUT_RANKS = re.compile(r"\b(local_rank|rank|trainer_id|worker_index|worker_id|is_first_worker)\b|PADDLE_TRAINER_ID")
_FIRST = re.compile(r"(\w+\.)*is_first_worker\(\)")
_SAVES = ("save_persistables", "save_inference_model")
_SAVE_BY_HAND = ("a save below a rank's condition", "move it out of the `if`: every rank must call it, rank 0 writes")


def _is_rank_test(node: cst.BaseExpression) -> bool:
    """Whether an expression asks if this is the first rank."""
    text = re.sub(r"\s", "", source(node))
    if _FIRST.fullmatch(text):
        return True
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Not):
        return bool(_RANK.fullmatch(re.sub(r"\s", "", source(node.expression))))
    rank = re.fullmatch(r"(?P<left>.+)==0|0==(?P<right>.+)", text)
    return bool(rank and _RANK.fullmatch(rank["left"] or rank["right"]))


def _without_rank(node: cst.BaseExpression) -> tuple[bool, cst.BaseExpression | None]:
    """(whether a rank was asked for, what is left of the condition; None = nothing)."""
    if _is_rank_test(node):
        return True, None
    if isinstance(node, cst.BooleanOperation) and isinstance(node.operator, cst.And):
        if _is_rank_test(node.left):
            return True, node.right
        left_asked, left = _without_rank(node.left)
        if _is_rank_test(node.right):
            return True, node.left
        if left_asked and left is not None:
            return True, node.with_changes(left=left)
    return False, node


def _is_save(node: cst.CSTNode) -> bool:
    """Whether a statement is one call of a collective save of fleet, after it was rewritten."""
    if not isinstance(node, cst.SimpleStatementLine) or len(node.body) != 1:
        return False
    expression = node.body[0]
    if not isinstance(expression, cst.Expr) or not isinstance(expression.value, cst.Call):
        return False
    return source(expression.value.func) in {f"fleet.{name}" for name in _SAVES}


def _opened(node: cst.If) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement] | None:
    """The statements without the rank's condition; None if that would change more than the saves."""
    asked, rest = _without_rank(node.test)
    if not asked or node.orelse is not None or not isinstance(node.body, cst.IndentedBlock):
        return None
    if not node.body.body or not all(_is_save(one) for one in node.body.body):
        return None
    if rest is not None:
        return node.with_changes(test=rest)
    if any(line.comment for line in node.body.footer) or node.body.header.comment:
        return None
    first, *others = node.body.body
    if not isinstance(first, cst.SimpleStatementLine):
        return None
    first = first.with_changes(leading_lines=[*node.leading_lines, *first.leading_lines])
    return cst.FlattenSentinel([first, *(one for one in others if isinstance(one, cst.SimpleStatementLine))])


def _hides_a_save(node: cst.If) -> bool:
    """Whether a save is somewhere below a condition about ranks."""
    return bool(_ABOUT_RANKS.search(source(node.test))) and any(
        f"fleet.{name}(" in source(part) for name in _SAVES for part in (node.body, node.orelse) if part is not None
    )
