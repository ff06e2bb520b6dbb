"""``fetch_list=[loss.name]`` -> ``fetch_list=[loss]``: Paddle 3 takes values, also of parameters, by no name."""

from __future__ import annotations

import libcst as cst


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
