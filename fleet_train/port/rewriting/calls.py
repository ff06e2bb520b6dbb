"""Rewrites the arguments of one call by a row of the table."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from fleet_train.port.tables.rules import Parameter, To

_NO_SPACES = cst.AssignEqual(whitespace_before=cst.SimpleWhitespace(""), whitespace_after=cst.SimpleWhitespace(""))
# act="relu" and its like, as a function of one argument.
ACTIVATIONS = {
    "relu": "paddle.nn.functional.relu",
    "sigmoid": "paddle.nn.functional.sigmoid",
    "softmax": "paddle.nn.functional.softmax",
    "tanh": "paddle.tanh",
}


class Undecided(Exception):
    """The arguments do not show that the new call means the same; the text says why."""


@dataclass(frozen=True)
class Bound:
    """One argument of the call and its parameter."""

    parameter: Parameter
    argument: cst.Arg
    position: int | None


def source(node: cst.CSTNode) -> str:
    """The source text of a node."""
    return cst.Module([]).code_for_node(node)


def dotted(name: str) -> cst.BaseExpression:
    """``paddle.nn.functional.relu`` as an expression."""
    return cst.parse_expression(name)


def bind(call: cst.Call, row: To) -> list[Bound]:
    """Each argument with its old parameter, in the order of the call. Raises Undecided."""
    parameters = {one.old: one for one in row.parameters}
    order, bound = list(row.parameters), list[Bound]()
    for index, argument in enumerate(call.args):
        if argument.star:
            raise Undecided(f"`{argument.star}{source(argument.value)}` hides which arguments are given")
        if argument.keyword is not None:
            name = argument.keyword.value
            if name not in parameters:
                raise Undecided(f"the argument `{name}` is not known")
            bound.append(Bound(parameters[name], argument, None))
        elif index >= len(order):
            raise Undecided(f"{index + 1} positional arguments, {len(order)} are known")
        elif index >= row.positional and not row.ordered:
            raise Undecided("the order of these positional arguments differs between versions")
        else:
            bound.append(Bound(order[index], argument, index))
    return bound


def rewritten(original: cst.Call, updated: cst.Call, row: To) -> cst.BaseExpression:
    """``updated`` as a call of the row's new function. ``original`` has the text that decides. Raises Undecided."""
    bound, given = bind(original, row), {}
    arguments: list[cst.Arg] = []
    for one, new in zip(bound, updated.args, strict=True):
        given[one.parameter.old] = source(one.argument.value)
        kept = _argument(one, new, row)
        if kept is not None:
            arguments.append(kept)
    missing = [(one.new, one.missing) for one in row.parameters if one.missing is not None and one.old not in given]
    for keyword, text in [*missing, *row.added]:
        arguments.append(as_keyword(cst.Arg(cst.parse_expression(text)), keyword))
    call: cst.BaseExpression = updated.with_changes(
        func=dotted(_chosen(row, given)), args=_separated(arguments, updated)
    )
    if row.then:
        call = cst.Attribute(call, cst.Name(row.then))
    return _activated(call, row, given)


def _argument(one: Bound, new: cst.Arg, row: To) -> cst.Arg | None:
    """The argument of the new call, or None if there is none today."""
    parameter, text = one.parameter, source(one.argument.value)
    if parameter.old == row.act:
        return None
    if row.choose and parameter.old == row.choose[0]:
        return None
    if parameter.dropped is not None:
        if parameter.dropped and text not in parameter.dropped:
            raise Undecided(f"`{parameter.old}={text}` has no equal today")
        return None
    if parameter.old in row.values:
        if text not in row.values[parameter.old]:
            raise Undecided(f"`{parameter.old}={text}` cannot be read")
        new = new.with_changes(value=cst.parse_expression(row.values[parameter.old][text]))
    if one.position is not None and one.position < row.positional:
        return new
    if one.position is None and parameter.new == parameter.old:
        return new
    return as_keyword(new, parameter.new)


def as_keyword(argument: cst.Arg, keyword: str) -> cst.Arg:
    """The argument, given by this name."""
    equal = argument.equal if isinstance(argument.equal, cst.AssignEqual) else _NO_SPACES
    return argument.with_changes(keyword=cst.Name(keyword), equal=equal)


def _separated(arguments: list[cst.Arg], call: cst.Call) -> list[cst.Arg]:
    """Commas between the arguments, with the layout of the old ones; the last one ends as the last old one did."""
    if not arguments:
        return []
    between = next((one.comma for one in call.args[:-1] if isinstance(one.comma, cst.Comma)), None)
    between = between or cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    last = call.args[-1] if call.args else None
    inner = [
        one if isinstance(one.comma, cst.Comma) and one is not last else one.with_changes(comma=between)
        for one in arguments[:-1]
    ]
    end = arguments[-1].with_changes(
        comma=last.comma if last else cst.MaybeSentinel.DEFAULT,
        whitespace_after_arg=last.whitespace_after_arg if last else cst.SimpleWhitespace(""),
    )
    return [*inner, end]


def _chosen(row: To, given: dict[str, str]) -> str:
    if row.choose is None:
        return row.new
    parameter, names = row.choose
    text = given.get(parameter, "")
    if text not in names:
        raise Undecided(f"`{parameter}={text}` decides between {' and '.join(sorted(set(names.values())))}")
    return names[text]


def _activated(call: cst.BaseExpression, row: To, given: dict[str, str]) -> cst.BaseExpression:
    text = given.get(row.act, "None") if row.act else "None"
    if text == "None":
        return call
    function = ACTIVATIONS.get(text.strip("'\""))
    if function is None or text[0] not in "'\"":
        raise Undecided(f"`{row.act}={text}` cannot be read")
    return cst.Call(dotted(function), [cst.Arg(call)])
