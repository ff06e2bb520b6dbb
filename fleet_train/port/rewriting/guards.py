"""``if fleet.worker_index() == 0:`` around a save: the save is a collective call, in which only rank 0 writes."""

from __future__ import annotations

import re

import libcst as cst

from fleet_train.port.rewriting.calls import source

_RANK = re.compile(
    r"(fleet\.(worker_index|rank)\(\)|(\w+\.)*(trainer_id|rank|worker_index|worker_id)(\(\))?"
    r"|int\(os\.(environ|getenv).*PADDLE_TRAINER_ID.*\))"
)
_ABOUT_RANKS = re.compile(r"\b(local_rank|rank|trainer_id|worker_index|worker_id|is_first_worker)\b|PADDLE_TRAINER_ID")
_FIRST = re.compile(r"(\w+\.)*is_first_worker\(\)")
SAVES = ("save_persistables", "save_inference_model")
BY_HAND = ("a save below a rank's condition", "move it out of the `if`: every rank must call it, rank 0 writes")


def is_rank_test(node: cst.BaseExpression) -> bool:
    """Whether an expression asks if this is the first rank."""
    text = re.sub(r"\s", "", source(node))
    if _FIRST.fullmatch(text):
        return True
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Not):
        return bool(_RANK.fullmatch(re.sub(r"\s", "", source(node.expression))))
    rank = re.fullmatch(r"(?P<left>.+)==0|0==(?P<right>.+)", text)
    return bool(rank and _RANK.fullmatch(rank["left"] or rank["right"]))


def without_rank(node: cst.BaseExpression) -> tuple[bool, cst.BaseExpression | None]:
    """(whether a rank was asked for, what is left of the condition; None = nothing)."""
    if is_rank_test(node):
        return True, None
    if isinstance(node, cst.BooleanOperation) and isinstance(node.operator, cst.And):
        if is_rank_test(node.left):
            return True, node.right
        left_asked, left = without_rank(node.left)
        if is_rank_test(node.right):
            return True, node.left
        if left_asked and left is not None:
            return True, node.with_changes(left=left)
    return False, node


def is_save(node: cst.CSTNode) -> bool:
    """Whether a statement is one call of a collective save of fleet, after it was rewritten."""
    if not isinstance(node, cst.SimpleStatementLine) or len(node.body) != 1:
        return False
    expression = node.body[0]
    if not isinstance(expression, cst.Expr) or not isinstance(expression.value, cst.Call):
        return False
    return source(expression.value.func) in {f"fleet.{name}" for name in SAVES}


def opened(node: cst.If) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement] | None:
    """The statements without the rank's condition; None if that would change more than the saves."""
    asked, rest = without_rank(node.test)
    if not asked or node.orelse is not None or not isinstance(node.body, cst.IndentedBlock):
        return None
    if not node.body.body or not all(is_save(one) for one in node.body.body):
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


def hides_a_save(node: cst.If) -> bool:
    """Whether a save is somewhere below a condition about ranks."""
    return bool(_ABOUT_RANKS.search(source(node.test))) and any(
        f"fleet.{name}(" in source(part) for name in SAVES for part in (node.body, node.orelse) if part is not None
    )
