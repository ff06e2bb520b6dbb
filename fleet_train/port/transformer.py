"""Queries of every rewriting step about the script around a node, and the marks that it adds there."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import libcst as cst
from libcst.metadata import ParentNodeProvider, PositionProvider, Scope, ScopeProvider

from fleet_train.port import calls
from fleet_train.port.calls import HEADS, Undecided, as_keyword, dotted, may_bring, source
from fleet_train.port.facts import Facts, Meaning, meaning_of, means_only, names_one_of
from fleet_train.port.index import is_old, rule_of
from fleet_train.port.rules import Rule


class Transformer(cst.CSTTransformer):
    """``needed``: first parts of the names written. ``kept``: (import statement, bound name) that marked uses need."""

    METADATA_DEPENDENCIES = (ScopeProvider, ParentNodeProvider, PositionProvider)

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self.facts = facts
        self.needed: set[str] = set()
        self.kept: set[tuple[cst.CSTNode, str]] = set()
        self._comments: dict[cst.CSTNode, list[str]] = {}

    # What the tree knows

    def scope_of(self, node: cst.CSTNode) -> Scope | None:
        return self.get_metadata(ScopeProvider, node, None)

    def line_of(self, node: cst.CSTNode) -> int:
        return self.get_metadata(PositionProvider, node).start.line

    def parent_of(self, node: cst.CSTNode) -> cst.CSTNode:
        return self.get_metadata(ParentNodeProvider, node)

    def meaning_of(self, node: cst.CSTNode) -> Meaning | None:
        return meaning_of(node, self.scope_of)

    def rule_of(self, node: cst.CSTNode) -> Rule | None:
        meaning = self.meaning_of(node)
        return rule_of(meaning.name, self.facts.is_fleet_script) if meaning else None

    def names_one_of(self, found: set[tuple[int, str]], node: cst.BaseExpression) -> bool:
        """Whether a node is a name of which a fact is known."""
        return names_one_of(found, node, self.scope_of(node))

    def may_write(self, head: str, node: cst.CSTNode) -> bool:
        """Whether ``head`` means at ``node`` what our imports bind to it."""
        return means_only(head, HEADS[head], node, self.scope_of, partial(may_bring, head))

    # Marks

    def mark(self, node: cst.CSTNode, what: str, do: str) -> None:
        """A TODO line above the statement that ``node`` is in."""
        while not hasattr(node, "leading_lines") or isinstance(node, cst.Decorator):
            node = self.parent_of(node)
        self._comments.setdefault(node, []).append(calls.comment(what, do))

    def keep(self, meaning: Meaning) -> None:
        """The imports behind an old name that stays."""
        if is_old(meaning.name):
            self.kept |= {(one.node, one.name) for one in meaning.imports}

    def visit_Module(self, node: cst.Module) -> None:
        self._first = (node.body[0], node.header) if node.body else None

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        result = super().on_leave(original_node, updated_node)
        comments = self._comments.get(original_node)
        if comments and self._first is not None and original_node is self._first[0]:
            comments = calls.not_in(self._first[1], comments)
        if not comments or not isinstance(result, (cst.CSTNode, cst.FlattenSentinel)):
            return result
        if isinstance(result, cst.FlattenSentinel):
            first, *others = result
            return cst.FlattenSentinel([_commented(first, comments), *others])
        return _commented(result, comments)


def _commented(node: Any, comments: list[str]) -> Any:
    return node.with_changes(leading_lines=calls.with_marks(node.leading_lines, comments))


# Calls whose new form depends on more than the names of their arguments.


Special = Callable[[Transformer, cst.Call, cst.Call], cst.BaseExpression | None]


def keyword(call: cst.Call, name: str) -> cst.Arg | None:
    """The argument that is given by this name."""
    return next((one for one in call.args if one.keyword is not None and one.keyword.value == name), None)


def layers_data(script: Transformer, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
    """``fluid.layers.data``: with a shape in plain numbers it is known whether a batch dimension comes in front."""
    del script
    names = ("name", "shape", "append_batch_size", "dtype", "lod_level", "type", "stop_gradient")
    given: dict[str, cst.Arg] = {}
    for index, (old, new) in enumerate(zip(original.args, updated.args, strict=True)):
        name = old.keyword.value if old.keyword else names[index] if index < len(names) else ""
        if old.star or name not in names:
            return None
        given[name] = new
    texts = {name: source(argument.value) for name, argument in given.items()}
    if texts.get("lod_level", "0") != "0":
        raise Undecided(f"lod_level={texts['lod_level']}: there are no sequences with levels of detail today")
    if not _is_plain(given.get("shape")) or texts.get("stop_gradient", "True") != "True" or "type" in texts:
        return None
    if texts.get("append_batch_size", "True") not in ("True", "False"):
        return None
    value = cst.ensure_type(given["shape"].value, cst.List)
    if texts.get("append_batch_size", "True") == "True" and not _is_open(value):
        first = cst.Element(cst.Name("None"), comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
        value = value.with_changes(elements=[first, *value.elements])
    kept = [
        argument.with_changes(value=value) if name == "shape" else argument
        for name, argument in given.items()
        if name in ("name", "shape", "dtype")
    ]
    # Another parameter stands in front of dtype today: it may not stay positional.
    kept = [one if one.keyword or index < 2 else as_keyword(one, "dtype") for index, one in enumerate(kept)]
    end = updated.args[-1]
    kept[-1] = kept[-1].with_changes(comma=end.comma, whitespace_after_arg=end.whitespace_after_arg)
    return updated.with_changes(func=dotted("paddle.static.data"), args=kept)


def _is_plain(shape: cst.Arg | None) -> bool:
    if shape is None or not isinstance(shape.value, cst.List):
        return False
    return all(source(one.value).lstrip("-").isdigit() or source(one.value) == "None" for one in shape.value.elements)


def _is_open(shape: cst.List) -> bool:
    return any(source(one.value).startswith(("-", "None")) for one in shape.elements)


def truncated_normal(script: Transformer, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
    """1.8 cut off at two deviations from the mean, today's default is -2 and 2 whatever the deviation."""
    del script
    given = dict(zip(("loc", "scale", "seed"), (one for one in original.args if one.keyword is None), strict=False))
    given |= {one.keyword.value: one for one in original.args if one.keyword is not None}
    if any(one.star for one in original.args) or not given.keys() <= {"loc", "scale", "seed"}:
        return None
    loc, scale = (source(given[name].value) if name in given else "" for name in ("loc", "scale"))
    if not scale or source(given["seed"].value if "seed" in given else cst.Integer("0")) != "0":
        return None
    if "(" in loc + scale:
        raise Undecided(f"`{loc or scale}` would be computed twice; a and b are its limits")
    mean, spread = loc or "0.0", scale if re.fullmatch(r"[\w.\-]+", scale) else f"({scale})"
    text = f"f(mean={mean}, std={scale}, a={mean} - 2 * {spread}, b={mean} + 2 * {spread})"
    if mean in ("0.0", "0"):
        text = f"f(mean={mean}, std={scale}, a=-2 * {spread}, b=2 * {spread})"
    call = cst.ensure_type(cst.parse_expression(text), cst.Call)
    return updated.with_changes(func=dotted("paddle.nn.initializer.TruncatedNormal"), args=call.args)


def cuda_place(script: Transformer, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
    """In a fleet script every rank has its device, on CPUs too; else the place stays."""
    if not script.facts.is_fleet_script:
        return None
    here, line = id(script.scope_of(original)), script.line_of(original)
    lines = [init for scope, init in script.facts.init_lines if scope == here]
    if lines and min(lines) > line:
        script.mark(original, "fleet.place() before fleet.init", "move fleet.init(...) above this line")
    return updated.with_changes(func=dotted("fleet.place"), args=[])


def compiled_program(script: Transformer, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
    """The program itself: there is one process per device, and the executor compiles what it runs."""
    if not updated.args or updated.args[0].star or updated.args[0].keyword is not None:
        raise Undecided("the program is not the first argument")
    outer = script.parent_of(original)
    call = script.parent_of(outer) if isinstance(outer, cst.Attribute) else None
    settings = [*original.args[1:], *(call.args if isinstance(call, cst.Call) else ())]
    named = [one.keyword.value if one.keyword else "a setting" for one in settings]
    if lost := [name for name in named if name not in ("loss_name", "places")]:
        script.mark(original, f"CompiledProgram with {', '.join(lost)}", "settings belong to DistributedStrategy")
    return updated.args[0].value


CALLS: dict[str, Special] = {
    "paddle.fluid.layers.data": layers_data,
    "paddle.fluid.CUDAPlace": cuda_place,
    "paddle.fluid.initializer.TruncatedNormal": truncated_normal,
    "paddle.CUDAPlace": cuda_place,
    "paddle.fluid.CompiledProgram": compiled_program,
    "paddle.static.CompiledProgram": compiled_program,
}
