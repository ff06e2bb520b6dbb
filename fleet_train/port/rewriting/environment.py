"""``FLAGS_enable_pir_api``: without PIR nothing of this package works, so what switched it off switches it on."""

from __future__ import annotations

import libcst as cst

from fleet_train.port.rewriting.calls import source
from fleet_train.port.rewriting.facts import index
from fleet_train.port.rewriting.transformer import Transformer

_FLAG = "FLAGS_enable_pir_api"
_ON = {
    "0": "1",
    "False": "True",
    **{f"{quote}{off}{quote}": f"{quote}1{quote}" for quote in "'\"" for off in ("0", "False", "false")},
}
_SETTERS = ("setdefault", "putenv")


def on_in_assignment(script: Transformer, original: cst.Assign, updated: cst.Assign) -> cst.Assign:
    """``os.environ["FLAGS_enable_pir_api"] = "0"``."""
    targets = [target.target for target in original.targets]
    if not any(isinstance(target, cst.Subscript) and _is_flag(index(target)) for target in targets):
        return updated
    return updated.with_changes(value=_on(script, original, updated.value))


def on_in_dictionary(script: Transformer, original: cst.DictElement, updated: cst.DictElement) -> cst.DictElement:
    """``paddle.set_flags({"FLAGS_enable_pir_api": 0})``."""
    return (
        updated.with_changes(value=_on(script, original, updated.value)) if _is_flag(source(original.key)) else updated
    )


def on_in_call(script: Transformer, original: cst.Call, updated: cst.Call) -> cst.Call:
    """``os.environ.setdefault("FLAGS_enable_pir_api", "0")``, ``os.environ.update(FLAGS_enable_pir_api="0")``."""
    first = original.args[0].value if len(original.args) == 2 else None
    sets = (
        isinstance(original.func, cst.Attribute)
        and original.func.attr.value in _SETTERS
        and isinstance(first, cst.SimpleString)
        and _is_flag(first.value)
    )
    arguments = [
        new.with_changes(value=_on(script, original, new.value))
        if (sets and position == 1) or (old.keyword is not None and old.keyword.value == _FLAG)
        else new
        for position, (old, new) in enumerate(zip(original.args, updated.args, strict=True))
    ]
    return updated.with_changes(args=arguments)


def _is_flag(text: str) -> bool:
    return text in (f'"{_FLAG}"', f"'{_FLAG}'")


def _on(script: Transformer, node: cst.CSTNode, value: cst.BaseExpression) -> cst.BaseExpression:
    text = source(value)
    if text in _ON:
        return cst.parse_expression(_ON[text])
    if text not in _ON.values() and text.strip("'\"").lower() != "true":
        script.mark(node, f"{_FLAG}={text}", "leave it on: programs of the old IR are not supported")
    return value
