"""What port does for training: ``minimize`` in the program of its loss, the truth of values, a strategy's settings."""

from __future__ import annotations

import ast
import re

import libcst as cst

from fleet_train.errors import ProfileError
from fleet_train.port.calls import dotted, keyword, keyword_of, positional, source
from fleet_train.port.facts import Transformer
from fleet_train.profile.fleet_fields import STOCK_FIELDS, outcome_of

_MINIMIZE = ("loss", "startup_program", "parameter_list", "no_grad_set", "callbacks")


def minimize(script: Transformer, original: cst.Call, updated: cst.Call) -> cst.Call:
    """``compat.minimize(optimizer, loss, ...)`` where parameters are listed, or another program may be the current one:
    it finds names, and those of a clone, in the program of the loss. The same for ``backward``."""
    if keyword(original, "grad_clip") is not None:
        script.mark(original, "minimize(grad_clip=...)", "give grad_clip to the optimizer")
        return updated
    function = updated.func
    renamed = [
        argument.with_changes(keyword=cst.Name("parameter_list")) if keyword_of(argument) == "parameters" else argument
        for argument in updated.args
    ]
    known = all(not argument.star and keyword_of(argument) in ("", *_MINIMIZE) for argument in renamed)
    if not known or not renamed or not isinstance(function, cst.Attribute) or source(function.value) == "super()":
        return updated
    lists = any(map(_may_list_names, [*positional(original)[2:4], *map(_named_list, original.args)]))
    method = function.attr.value
    elsewhere = method == "minimize" and script.facts.makes_programs and not _is_guarded(script, original)
    if script.facts.is_dynamic or not (lists or elsewhere):
        return updated.with_changes(args=[_as_today(argument) for argument in updated.args])
    if not script.may_write("compat", original):
        script.mark(original, method, f"compat.{method}: `compat` is the name of something else here; rename that")
        return updated
    script.needed.add("compat")
    optimizer = cst.Arg(function.value, comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
    return updated.with_changes(func=dotted(f"compat.{method}"), args=[optimizer, *renamed])


def _as_today(argument: cst.Arg) -> cst.Arg:
    return (
        argument.with_changes(keyword=cst.Name("parameters")) if keyword_of(argument) == "parameter_list" else argument
    )


def _named_list(argument: cst.Arg) -> cst.Arg | None:
    return argument if keyword_of(argument) in ("parameters", "parameter_list", "no_grad_set") else None


def _may_list_names(argument: cst.Arg | None) -> bool:
    """Whether an argument may list names: not if it is a layer's parameters, which are values today as well."""
    return argument is not None and not re.search(r"^None$|\.parameters\(\)$", source(argument.value))


def _is_guarded(script: Transformer, node: cst.CSTNode) -> bool:
    """Whether the program of the losses around ``node`` is the current one."""
    while not isinstance(node, cst.Module):
        node = script.parent_of(node)
        if isinstance(node, cst.With) and any("program_guard(" in source(item.item) for item in node.items):
            return True
    return False


# `if label:` of a value of the program, which was always true; today it is an error.


_TRUTH = (
    "`{} is not None`, which it was; a comparison of its elements is paddle.static.nn.cond, or fetched and compared"
)


def truth(script: Transformer, original: cst.BaseExpression, updated: cst.BaseExpression) -> cst.BaseExpression:
    """An expression whose truth is asked for: values that may be None are compared with it."""
    if not script.facts.is_static:
        return updated
    if isinstance(original, cst.BooleanOperation) and isinstance(updated, cst.BooleanOperation):
        left, right = truth(script, original.left, updated.left), truth(script, original.right, updated.right)
        return updated.with_changes(left=left, right=right)
    if isinstance(original, cst.UnaryOperation) and isinstance(updated, cst.UnaryOperation):
        if isinstance(original.operator, cst.Not) and not isinstance(original.expression, cst.Name):
            return updated.with_changes(expression=truth(script, original.expression, updated.expression))
        return updated
    return _compared(updated, "is not") if _is_value(script, original) else updated


def negated(script: Transformer, original: cst.UnaryOperation, updated: cst.UnaryOperation) -> cst.BaseExpression:
    """Rewrite ``not label``, wherever it stands, for a value that may be None."""
    if script.facts.is_static and isinstance(original.operator, cst.Not) and _is_value(script, original.expression):
        return _compared(updated.expression, "is")
    return updated


def mark_choice(script: Transformer, node: cst.BooleanOperation) -> None:
    """Mark ``label or other`` where the value of the expression counts, and not its truth."""
    outer: cst.CSTNode = node
    while isinstance(outer, (cst.BooleanOperation, cst.UnaryOperation)):
        inner, outer = outer, script.parent_of(outer)
    if getattr(outer, "test", None) is not inner and script.facts.is_static and script.holds("value", node.left):
        left = source(node.left)
        script.mark(node, f"the truth of {left}", f"{left} if {left} is not None else ...")


def mark_loop(script: Transformer, node: cst.While) -> None:
    """Mark ``while value:``, which never ended."""
    test = node.test.expression if isinstance(node.test, cst.UnaryOperation) else node.test
    if script.facts.is_static and (script.holds("value", test) or script.holds("condition", test)):
        script.mark(
            node, f"while {source(node.test)}", "paddle.static.nn.while_loop, or fetch the value and compare it"
        )


def _is_value(script: Transformer, node: cst.BaseExpression) -> bool:
    """Whether this variable is a value of the program or None; a mark if it is only perhaps one."""
    if not script.holds("value", node) and not script.holds("condition", node):
        return False
    if script.holds("condition", node) or script.holds("anything", node):
        script.mark(node, f"the truth of {source(node)}", _TRUTH.format(source(node)))
        return False
    return True


def _compared(value: cst.BaseExpression, how: str) -> cst.BaseExpression:
    text = f"({source(value)} {how} None)" if value.lpar else f"{source(value)} {how} None"
    return cst.parse_expression(text)


# `strategy.sharding_configs = {...}`: what a profile cannot do is refused when the line runs.


def mark_settings(script: Transformer, node: cst.Assign) -> None:
    """Marks for settings of a strategy of Fleet that are refused, as far as they are written out."""
    for target in node.targets:
        name = target.target.attr.value if isinstance(target.target, cst.Attribute) else ""
        if name not in STOCK_FIELDS or not script.facts.is_fleet_script:
            continue
        if name.endswith("_configs") and isinstance(node.value, cst.Dict):
            for element in node.value.elements:
                if isinstance(element, cst.DictElement) and isinstance(element.key, cst.SimpleString):
                    _mark_setting(script, node, f"{name}.{element.key.raw_value}", element.value)
        elif isinstance(target.target, cst.Attribute) and script.holds("strategy", target.target.value):
            _mark_setting(script, node, name, node.value)


def _mark_setting(script: Transformer, node: cst.Assign, path: str, value: cst.BaseExpression) -> None:
    try:
        outcome_of(path, ast.literal_eval(source(value)))
    except ProfileError as error:
        script.mark(node, path, str(error))
    except (ValueError, SyntaxError):
        return
