"""Method calls that are Paddle's for any object name: ``exe.run``, ``program.clone``, ``opt.minimize``."""

from __future__ import annotations

import re

import libcst as cst

from fleet_train.port.calls import dotted, source
from fleet_train.port.facts import is_block, parameter_arguments
from fleet_train.port.transformer import Transformer, keyword

_BY_HAND = {
    "all_parameters": "program.global_block().all_parameters()",
    "train_from_dataset": "compat.train_from_dataset(exe, program, dataset, ...), if this is an executor",
    "infer_from_dataset": "compat.infer_from_dataset(exe, program, dataset, ...), if this is an executor",
    "_global_learning_rate": "optimizer.get_lr(), a number to print",
    "with_data_parallel": "delete it: the program itself runs, one process per device",
}
_FROM_DATASET = ("train_from_dataset", "infer_from_dataset")
_DATASET_ARGUMENTS = set("program dataset scope thread debug fetch_list fetch_info print_period fetch_handler".split())
_CLONE = "compat.clone_for_test(program) for a program for testing, program.clone() for one for training"
_BY_NAME = "the parameter itself: [p for p in program.global_block().all_parameters() if p.name in names]"
# What is a program, of all that has a method `clone` and may be given True.
_PROGRAM = re.compile(r"(?i)(prog(ram)?|main)(\(\))?\.clone$")
# What a block of today's programs does not have.
_OF_BLOCKS = {
    "var": "keep the Python variable; a parameter's value: paddle.static.global_scope().find_var(name).get_tensor()",
    "_var_recursive": "keep the Python variable",
    "has_var": "keep the Python variable",
    "vars": "program.list_vars()",
    "create_var": "paddle.static.data, or the function that computes the value",
    "create_parameter": "compat.create_parameter",
    "append_op": "the function of paddle that does it",
}


def rewritten(script: Transformer, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
    """``updated`` with what can be done; marks for the rest."""
    function = original.func
    if not script.facts.uses_paddle or not isinstance(function, cst.Attribute):
        return updated
    method = function.attr.value
    if method == "with_data_parallel" and _was_compiled(script, function.value):
        return updated.func.value if isinstance(updated.func, cst.Attribute) else updated
    if method == "all_parameters" and source(function.value).endswith("global_block()"):
        return updated
    if method in _FROM_DATASET:
        meaning = script.meaning_of(function)
        if meaning is not None and meaning.name.startswith("fleet_train."):
            return updated
        if (call := _from_dataset(script, original, updated)) is not None:
            return call
    if method in _BY_HAND:
        script.mark(original, f"{source(function.value).strip()}.{method}", _BY_HAND[method])
    elif method == "clone":
        return _clone(script, original, updated)
    elif method == "run":
        return _run(script, original, updated)
    elif method == "minimize":
        return _minimize(script, original, updated)
    elif method == "append" and script.names_one_of(
        script.facts.fetch_lists | script.facts.parameter_lists, function.value
    ):
        return appended_without_name(updated)
    return updated


def _from_dataset(script: Transformer, original: cst.Call, updated: cst.Call) -> cst.Call | None:
    """``exe.train_from_dataset(...)`` as ``compat``'s function of the executor; None if it may be another object's."""
    named = {one.keyword.value for one in original.args if one.keyword is not None}
    if any(one.star for one in original.args) or not named <= _DATASET_ARGUMENTS:
        return None
    if "dataset" not in named and len(original.args) - len(named) < 2:
        return None
    if not script.may_write("compat", original):
        return None
    script.needed.add("compat")
    function = cst.ensure_type(updated.func, cst.Attribute)
    executor = cst.Arg(function.value, comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
    call = updated.with_changes(func=dotted(f"compat.{function.attr.value}"), args=[executor, *updated.args])
    return _fetching(script, original, call, keyword(original, "fetch_list"), shift=1)


def without_array(node: cst.BaseExpression) -> cst.BaseExpression:
    """``x`` of ``np.array(x)``."""
    if isinstance(node, cst.Call) and len(node.args) == 1 and source(node.func) in _ARRAYS:
        return node.args[0].value
    return node


_ARRAYS = {f"{module}.{name}" for module in ("np", "numpy") for name in ("array", "asarray")}


def mark_block(script: Transformer, node: cst.Attribute) -> None:
    """A mark where a block is asked for what it no longer has."""
    name = node.attr.value
    if name in _OF_BLOCKS and (is_block(node.value) or script.names_one_of(script.facts.blocks, node.value)):
        script.mark(node, f"{source(node.value)}.{name}", _OF_BLOCKS[name])


def _clone(script: Transformer, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
    """``main.clone(for_test=True)`` and ``main.clone(True)``."""
    text = _literal(original, "for_test")
    named = keyword(original, "for_test") is not None
    if not named and (text not in ("True", "False") or not _PROGRAM.search(source(original.func))):
        return updated
    if text == "False":
        return updated.with_changes(args=[])
    function = updated.func
    if text != "True" or not isinstance(function, cst.Attribute) or not script.may_write("compat", original):
        script.mark(original, f"clone(for_test={text})", _CLONE)
        return updated
    script.needed.add("compat")
    argument = cst.Arg(function.value)
    return updated.with_changes(func=dotted("compat.clone_for_test"), args=[argument])


def _was_compiled(script: Transformer, node: cst.BaseExpression) -> bool:
    meaning = script.meaning_of(node.func) if isinstance(node, cst.Call) else None
    return meaning is not None and meaning.name.endswith(".CompiledProgram")


def _literal(call: cst.Call, name: str) -> str:
    argument = keyword(call, name)
    if argument is None and name == "for_test" and len(call.args) == 1 and call.args[0].keyword is None:
        argument = call.args[0]
    return source(argument.value) if argument is not None else ""


def _third(call: cst.Call) -> cst.Arg | None:
    """The third argument, if it is given by position: the list to fetch of ``exe.run(program, feed, [loss.name])``."""
    plain = [one for one in call.args if one.keyword is None and not one.star]
    return call.args[2] if len(plain) > 2 and plain[2] is call.args[2] else None


def _run(script: Transformer, original: cst.Call, updated: cst.Call) -> cst.Call:
    return _fetching(script, original, updated, keyword(original, "fetch_list") or _third(original))


def _fetching(
    script: Transformer, original: cst.Call, updated: cst.Call, fetched: cst.Arg | None, shift: int = 0
) -> cst.Call:
    if fetched is None:
        return updated
    for text in texts_in(fetched.value):
        script.mark(original, f"fetching {text}", "fetch the Python variable: values have no names today")
    return _without_names(original, updated, [fetched], shift)


def with_parameters(script: Transformer, original: cst.Call, updated: cst.Call, name: str) -> cst.Call:
    """``parameters=[p.name]`` as ``[p]`` in calls of ``minimize`` and of what Paddle has under ``name``."""
    arguments = parameter_arguments(original, name)
    for argument in arguments:
        mark_parameters(script, original, argument.value)
    return _without_names(original, updated, arguments)


def mark_parameters(script: Transformer, node: cst.CSTNode, value: cst.BaseExpression) -> None:
    """A mark for each name of a parameter in a list."""
    for text in texts_in(value):
        script.mark(node, f"the parameter {text}", _BY_NAME)


def _without_names(original: cst.Call, updated: cst.Call, arguments: list[cst.Arg], shift: int = 0) -> cst.Call:
    """The call with values instead of names in these arguments; ``updated`` has ``shift`` more arguments in front."""
    kept = [
        one.with_changes(value=without_names(one.value)) if old in arguments else one
        for old, one in zip(original.args, updated.args[shift:], strict=True)
    ]
    return updated.with_changes(args=[*updated.args[:shift], *kept])


def _minimize(script: Transformer, original: cst.Call, updated: cst.Call) -> cst.Call:
    if keyword(original, "grad_clip") is not None:
        script.mark(original, "minimize(grad_clip=...)", "give grad_clip to the optimizer")
    updated = with_parameters(script, original, updated, "")
    return updated.with_changes(
        args=[
            one.with_changes(keyword=cst.Name("parameters"))
            if one.keyword is not None and one.keyword.value == "parameter_list"
            else one
            for one in updated.args
        ]
    )


# `fetch_list=[loss.name]` -> `fetch_list=[loss]`: Paddle 3 takes values, also of parameters, by no name.


def without_names(node: cst.BaseExpression) -> cst.BaseExpression:
    """A list display, tuple or comprehension of ``x.name`` as one of ``x``; other elements stay."""
    if isinstance(node, (cst.List, cst.Tuple, cst.Set)):
        return node.with_changes(elements=[one.with_changes(value=_value(one.value)) for one in node.elements])
    if isinstance(node, (cst.ListComp, cst.GeneratorExp, cst.SetComp)):
        return node.with_changes(elt=_value(node.elt))
    return node


def texts_in(node: cst.BaseExpression) -> list[str]:
    """Names given as strings: ``["mean_0.tmp_0"]``."""
    elements = node.elements if isinstance(node, (cst.List, cst.Tuple, cst.Set)) else ()
    return [one.value.value for one in elements if isinstance(one.value, cst.SimpleString)]


def _value(node: cst.BaseExpression) -> cst.BaseExpression:
    if isinstance(node, cst.Attribute) and node.attr.value == "name":
        return node.value
    return node


def appended_without_name(call: cst.Call) -> cst.Call:
    """``list.append(x.name)`` as ``list.append(x)``."""
    return call.with_changes(args=[one.with_changes(value=_value(one.value)) for one in call.args])
