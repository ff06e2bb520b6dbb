"""Rewrites the arguments of one call by a row of the table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from fleet_train.port.index import FLEET, canonical
from fleet_train.port.rules import Parameter, To

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


def keyword_of(argument: cst.Arg) -> str:
    """The name by which the argument is given, empty for one given by position."""
    return argument.keyword.value if argument.keyword is not None else ""


def keyword(call: cst.Call, name: str) -> cst.Arg | None:
    """The argument that is given by this name."""
    return next((argument for argument in call.args if keyword_of(argument) == name), None)


def positional(call: cst.Call) -> list[cst.Arg]:
    """The arguments that are given by position, without starred ones."""
    return [argument for argument in call.args if argument.keyword is None and not argument.star]


def bind(call: cst.Call, row: To) -> list[Bound]:
    """Each argument with its old parameter, in the order of the call. Raises Undecided."""
    parameters = {parameter.old: parameter for parameter in row.parameters}
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
    for binding, new in zip(bound, updated.args, strict=True):
        given[binding.parameter.old] = source(binding.argument.value)
        kept = _argument(binding, new, row)
        if kept is not None:
            arguments.append(kept)
    absent = [parameter for parameter in row.parameters if parameter.old not in given]
    missing = [(parameter.new, parameter.missing) for parameter in absent if parameter.missing is not None]
    for name, text in [*missing, *row.added]:
        arguments.append(as_keyword(cst.Arg(cst.parse_expression(text)), name))
    call: cst.BaseExpression = updated.with_changes(
        func=dotted(_chosen(row, given)), args=_separated(arguments, updated)
    )
    if row.then:
        call = cst.Attribute(call, cst.Name(row.then))
    return _activated(call, row, given)


def _argument(binding: Bound, new: cst.Arg, row: To) -> cst.Arg | None:
    """The argument of the new call, or None if there is none today."""
    parameter, text = binding.parameter, source(binding.argument.value)
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
    if binding.position is not None and binding.position < row.positional:
        return new
    if binding.position is None and parameter.new == parameter.old:
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
    between = next((argument.comma for argument in call.args[:-1] if isinstance(argument.comma, cst.Comma)), None)
    between = between or cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    last = call.args[-1] if call.args else None
    inner = [
        argument
        if isinstance(argument.comma, cst.Comma) and argument is not last
        else argument.with_changes(comma=between)
        for argument in arguments[:-1]
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


# Names as they are written and shown: the import that a new one needs, the display form of an old one.


# The first part of a new name, and the module that brings it; the old name whose import may bind the same.
HEADS = {
    "paddle": "paddle",
    "compat": "fleet_train.compat",
    "fleet": "fleet_train.fleet",
    "role_maker": "fleet_train.role_maker",
    "DistributedStrategy": "fleet_train.DistributedStrategy",
}
REPLACED = {
    "fleet": "paddle.distributed.fleet",
    "role_maker": f"{FLEET}base.role_maker",
    "DistributedStrategy": f"{FLEET}DistributedStrategy",
}
_WRAPPERS = set(ACTIVATIONS.values())


def shown(name: str) -> str:
    """A full name as people know it."""
    name = canonical(name)
    return (
        name.removeprefix("paddle.") if name.startswith("paddle.fluid.") else name.removeprefix("paddle.distributed.")
    )


def call_of(rule: To) -> str:
    return rule.new or " or ".join(dict.fromkeys(rule.targets))


def outer_names(node: cst.BaseExpression) -> list[str]:
    """The new names at the top of a rewritten call: the called one, those wrapped around it."""
    names = list[str]()
    while True:
        if isinstance(node, cst.Call):
            if isinstance(node.func, (cst.Name, cst.Attribute)) and source(node.func).partition(".")[0] in HEADS:
                names.append(source(node.func))
            if (
                len(node.args) == 1
                and node.args[0].keyword is None
                and isinstance(node.args[0].value, cst.Call)
                and names
                and names[-1] in _WRAPPERS
            ):
                node = node.args[0].value
                continue
            return names
        if isinstance(node, cst.Attribute):
            node = node.value
            continue
        return names


# TODO lines: code that cannot be rewritten automatically stays, with a line above it that says what to use.


PREFIX = "# TODO(fleet_train): "
_LINE = re.compile(r"^\s*" + re.escape(PREFIX) + r"(?P<what>.*?) -> (?P<do>.*)$")


@dataclass(frozen=True)
class Mark:
    """One thing to do by hand, at a line of the ported script."""

    path: str
    line: int
    what: str
    do: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what} -> {self.do}"


def comment(what: str, do: str) -> str:
    """The text of a TODO line; always one line."""
    return PREFIX + " ".join(f"{what} -> {do}".split())


def is_mark(line: cst.EmptyLine) -> bool:
    """Whether this is a TODO line."""
    return line.comment is not None and line.comment.value.startswith(PREFIX)


def without_done(lines: Sequence[cst.EmptyLine], due: Sequence[str], statement: str) -> list[cst.EmptyLine]:
    """The lines in front of a statement, without TODO lines about what it does not do any more. ``due``: those that it
    gets now. A line about what was rewritten beside it stays while the statement has the name that it is about."""
    return [line for line in lines if not is_mark(line) or line.comment.value in due or _is_open(line, statement)]  # type: ignore[union-attr]


def _is_open(line: cst.EmptyLine, statement: str) -> bool:
    match = _LINE.match(line.comment.value) if line.comment else None
    if match is None or match["what"].startswith(("CompiledProgram with", "fleet.place()")):
        return match is None or "fleet.place()" not in match["what"]
    name = re.match(r"fleet\.(?:\w+\.)*(\w+)", match["what"])
    return name is not None and bool(re.search(rf"\b{name[1]}\b", statement))


def not_in(lines: Sequence[cst.EmptyLine], comments: Sequence[str]) -> list[str]:
    """The comments that none of these lines is: what is above a module's first statement is the module's header."""
    there = {line.comment.value for line in lines if line.comment}
    return [text for text in dict.fromkeys(comments) if text not in there]


def with_marks(leading: Sequence[cst.EmptyLine], comments: Sequence[str]) -> list[cst.EmptyLine]:
    """Lines before a statement with the missing TODO lines added."""
    new = not_in(leading, comments)
    return [*leading, *(cst.EmptyLine(comment=cst.Comment(text)) for text in new)]


def marks_in(path: str, text: str) -> list[Mark]:
    """All TODO lines of a script, by line. The line is that of what the comment is about."""
    lines, marks = text.splitlines(), list[Mark]()
    for number, line in enumerate(lines, start=1):
        if match := _LINE.match(line):
            below = number
            while below < len(lines) and lines[below].lstrip().startswith("#"):
                below += 1
            marks.append(Mark(path, below + 1, match["what"], match["do"]))
    return marks
