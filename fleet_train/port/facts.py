"""The two things that a rewriting needs to know beyond its line: what a name means there, and facts of the script."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

import libcst as cst
from libcst.metadata import Assignment, ImportAssignment, ParentNodeProvider, PositionProvider, Scope, ScopeProvider

from fleet_train.port import calls
from fleet_train.port.calls import HEADS, REPLACED, keyword, keyword_of, positional, source
from fleet_train.port.index import CARRIED_OUT, FLUID, IN_STATIC_MODE, canonical, is_fleet, is_old, rule_of
from fleet_train.port.rules import Rule, To

_BUILD_STRATEGIES = ("paddle.fluid.BuildStrategy", "paddle.static.BuildStrategy")
_PARAMETERS = ("parameters", "parameter_list", "no_grad_set")
_PROGRAMS = re.compile(
    r"paddle\.(fluid|static)\.(Program|default_(main|startup)_program)|fleet_train\.compat\.clone(_for_test)?"
)
_EXECUTORS = ("paddle.fluid.Executor", "fleet_train.compat.Executor")
Kind = Literal[
    "fetch list",
    "parameter list",
    "fetched value",
    "fetched values",
    "block",
    "build strategy",
    "program",
    "strategy",
    "value",
    "condition",
    "anything",
]
"""What a variable of the script is known to hold: lists that are passed to ``fetch_list=`` or to an optimizer as its
parameters, one fetched value or the list of them, a block of a program, a BuildStrategy, a program, Fleet's strategy;
a value of the program, or None; a comparison of such values; or, perhaps, anything else."""
_HANDED_ON: tuple[Kind, ...] = ("fetched values", "fetched value", "condition", "value")
_VALUES = re.compile(
    r"(paddle\.fluid\.(layers\.(?!\w*reader|utils\.|create_array|double_buffer)|nets\.)|paddle\.static\.nn\.|"
    r"paddle\.nn\.functional\.|fleet_train\.compat\.(?!clone|minimize|\w*(reader|dataset)|from_generator))[a-z]\w*|"
    r"paddle\.fluid\.(data|embedding|one_hot)|paddle\.static\.data|paddle\.(mean|sum|add|subtract|multiply|divide|"
    r"matmul|concat|split|cast|reshape|squeeze|unsqueeze|transpose|stack|tanh|exp|log|sqrt|square|abs|max|min|clip|scale)"
)
_CONDITIONS = re.compile(
    r"paddle\.(fluid\.layers\.)?((less|greater)_(than|equal)|(not_)?equal|logical_\w+|reduce_(all|any)|all|any|is_empty)"
)
_OF_SHAPES = re.compile(
    r"\.(data|zeros|ones|fill_constant\w*|range|linspace|create_\w+|py_func|cond|case|switch_case|while_loop|concat|stack|"
    r"sums?|assign|cast|Print)$"
)
"""Layers that take something else first, or a list, whose truth says something."""
_OF_VALUES = ("input", "x", "y", "label", "logits", "index")
"""Names of parameters of layers, by which these take values."""


@dataclass
class Facts:
    """What is known of one script."""

    is_fleet_script: bool = False
    is_fluid_script: bool = False
    """Whether the script imports ``paddle.fluid`` of 1.x, whose programs were static unless a script said otherwise."""
    wraps_optimizer: bool = False
    """Whether the script calls ``distributed_optimizer``, which takes over what is wrapped around an optimizer."""
    imported: set[str] = field(default_factory=set)
    is_dynamic: bool = False
    enables_static: bool = False

    @property
    def is_static(self) -> bool:
        """Whether the script builds programs, as far as can be seen."""
        return not self.is_dynamic and (self.is_fluid_script or self.enables_static or self.makes_programs)

    makes_programs: bool = False
    """Whether the script makes programs beside the default ones."""
    makes_old_executor: bool = False
    """Whether the executor is, or becomes, that of `fleet_train.compat`: fetched scalars keep their old dimension."""
    numpy: str = ""
    """The name by which the module knows numpy."""
    variables: dict[Kind, set[tuple[int, str]]] = field(default_factory=lambda: defaultdict(set))
    """The variables of each kind: (id of the defining scope, name)."""
    init_lines: list[tuple[int, int]] = field(default_factory=list)
    """The calls of fleet.init: (id of the scope, line)."""


@dataclass(frozen=True)
class Meaning:
    """The full name of an imported thing, and the import that brings it."""

    name: str
    imports: tuple[ImportAssignment, ...]
    certain: bool
    """False where the name may also be bound to something else."""


class Names(cst.MetadataDependent):
    """Queries about the names around a node: follows import aliases, detects shadowing."""

    METADATA_DEPENDENCIES = (ScopeProvider, ParentNodeProvider, PositionProvider)

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self.facts = facts

    def scope_of(self, node: cst.CSTNode) -> Scope | None:
        return self.get_metadata(ScopeProvider, node, None)

    def line_of(self, node: cst.CSTNode) -> int:
        return self.get_metadata(PositionProvider, node).start.line

    def parent_of(self, node: cst.CSTNode) -> cst.CSTNode:
        return self.get_metadata(ParentNodeProvider, node)

    def meaning_of(self, node: cst.CSTNode) -> Meaning | None:
        """The full name of a chain of names; None if it does not come from an import."""
        parts = parts_of(node)
        scope = self.scope_of(root_of(node)) if parts else None
        if scope is None:
            return None
        bindings = scope[parts[0]]
        imports = [binding for binding in bindings if isinstance(binding, ImportAssignment)]
        names = {name.name for binding in imports for name in binding.get_qualified_names_for(".".join(parts))}
        if not names:
            return None
        return Meaning(min(names), tuple(imports), len(names) == 1 and len(imports) == len(bindings))

    def name_of(self, node: cst.CSTNode) -> str:
        """The name under which the table would have it, empty if it does not come from an import."""
        meaning = self.meaning_of(node)
        return canonical(meaning.name) if meaning else ""

    def rule_of(self, node: cst.CSTNode) -> Rule | None:
        meaning = self.meaning_of(node)
        if meaning is None or (meaning.name in IN_STATIC_MODE and not self.facts.is_static):
            return None
        in_fleet_script = self.facts.is_fleet_script and (self.facts.wraps_optimizer or meaning.name not in CARRIED_OUT)
        return rule_of(meaning.name, in_fleet_script)

    def holds(self, kind: Kind, node: cst.BaseExpression) -> bool:
        """Whether a node is a variable of this kind."""
        return not self.defining_scopes(node).isdisjoint(self.facts.variables[kind])

    def clones_program(self, call: cst.Call) -> bool:
        """Whether this is ``program.clone(...)``: of what is known to be a program, or has the name of one."""
        if not isinstance(call.func, cst.Attribute) or call.func.attr.value != "clone":
            return False
        return self.holds("program", call.func.value) or bool(_PROGRAM.search(source(call.func.value)))

    def defining_scopes(self, node: cst.BaseExpression) -> set[tuple[int, str]]:
        """The scopes in which a variable is assigned: (id of scope, name); empty for anything but a variable."""
        scope = self.scope_of(node)
        if not isinstance(node, cst.Name) or scope is None:
            return set()
        bindings: Collection[object] = scope[node.value]
        return {(id(binding.scope), node.value) for binding in bindings if isinstance(binding, Assignment)}

    def may_write(self, head: str, node: cst.CSTNode) -> bool:
        """Whether ``head`` means at ``node`` what our imports bind to it: it is free, ours, or old and replaced."""
        return self.means_only(
            head, node, lambda name: name == HEADS[head] or canonical(name) == REPLACED.get(head, "")
        )

    def means_only(self, head: str, node: cst.CSTNode, accepts: Callable[[str], bool]) -> bool:
        """Whether all that ``head`` may mean at ``node`` are imports of what is accepted."""
        scope = self.scope_of(node)
        bindings = scope[head] if scope is not None else ()
        return all(
            isinstance(binding, ImportAssignment)
            and all(accepts(name.name) for name in binding.get_qualified_names_for(head))
            for binding in bindings
        )


# What is a program, of all that has a method `clone`.
_PROGRAM = re.compile(r"(?i)(prog(ram)?|(^|[._])main)(\(\))?$")


class FactFinder(Names, cst.CSTVisitor):
    """Fills `Facts`."""

    def __init__(self) -> None:
        super().__init__(Facts())

    def visit_Import(self, node: cst.Import) -> None:
        for alias in node.names:
            self._imported(alias.evaluated_name)
            if alias.evaluated_name == "numpy":
                self.facts.numpy = alias.evaluated_alias or "numpy"

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        module = source(node.module) if node.module and not node.relative else ""
        if isinstance(node.names, cst.ImportStar):
            self._imported(module)
            return
        for alias in node.names:
            self._imported(f"{module}.{alias.evaluated_name}")

    def _imported(self, name: str) -> None:
        self.facts.imported.add(name)
        self.facts.is_fluid_script |= f"{name}.".startswith(FLUID)
        self.facts.is_fleet_script |= is_fleet(name) or name in ("fleet_train.fleet", "fleet_train.DistributedStrategy")

    def visit_Call(self, node: cst.Call) -> None:
        name = self.name_of(node.func)
        self._takes_values(node, name)
        if name == "paddle.enable_static":
            self.facts.enables_static = True
        if name in ("paddle.distributed.fleet.init", "fleet_train.fleet.init"):
            self.facts.init_lines.append((id(self.scope_of(node)), self.line_of(node)))
        if (fetched := keyword(node, "fetch_list")) is not None:
            self._remember("fetch list", fetched.value)
        for argument in parameter_arguments(node, name):
            self._remember("parameter list", argument.value)
        self.facts.wraps_optimizer |= name.endswith(("fleet.distributed_optimizer", "fleet.CollectiveOptimizer"))
        self.facts.makes_old_executor |= name in _EXECUTORS
        self.facts.makes_programs |= name in ("paddle.fluid.Program", "paddle.static.Program")
        if name in ("paddle.fluid.program_guard", "paddle.static.program_guard"):
            for argument in node.args:
                self._remember("program", argument.value)

    def visit_Attribute(self, node: cst.Attribute) -> None:
        name = self.name_of(node)
        self.facts.is_dynamic |= name.startswith(("paddle.fluid.dygraph", "paddle.fluid.enable_dygraph"))
        self.facts.is_dynamic |= name == "paddle.disable_static"

    def visit_Param(self, node: cst.Param) -> None:
        if node.default is not None and source(node.default) != "None":
            self._remember("anything", node.name)

    def _takes_values(self, call: cst.Call, name: str) -> None:
        """Variables that a layer is given are values of the program."""
        if _VALUES.fullmatch(name) and not _OF_SHAPES.search(name):
            rule = self.rule_of(call.func)
            known = [parameter.old for parameter in rule.parameters] if isinstance(rule, To) else []
            known = known or ["x", *(["y"] if "elementwise" in name else [])]
            named = [(keyword_of(argument), argument) for argument in call.args if argument.keyword is not None]
            for parameter, argument in [*zip(known, positional(call), strict=False), *named]:
                if parameter in _OF_VALUES:
                    self._remember("value", argument.value)

    def visit_Assign(self, node: cst.Assign) -> None:
        for target in node.targets:
            self._assigned(target.target, node.value)

    def _assigned(self, target: cst.BaseExpression, value: cst.BaseExpression) -> None:
        kind = self._kind_of(value)
        if kind is not None:
            self._remember(kind, target)
        if (kind != "value" and source(value) != "None") or self.holds("anything", value):
            self._remember("anything", target)
        if isinstance(target, (cst.Tuple, cst.List)) and kind == "fetched values":
            for element in target.elements:
                self._remember("fetched value", element.value)
        elif isinstance(target, (cst.Tuple, cst.List)) and isinstance(value, (cst.Tuple, cst.List)):
            for element, given in zip(target.elements, value.elements, strict=False):
                self._assigned(element.value, given.value)

    def visit_For(self, node: cst.For) -> None:
        self._iterated(node.target, node.iter)

    def visit_CompFor(self, node: cst.CompFor) -> None:
        self._iterated(node.target, node.iter)

    def visit_With(self, node: cst.With) -> None:
        for item in node.items:
            if item.asname is not None:
                self._remember("anything", item.asname.name)

    def _iterated(self, target: cst.BaseExpression, over: cst.BaseExpression) -> None:
        """``for one in fetched``, ``for old, one in zip(total, fetched)``, ``for index, one in enumerate(fetched)``."""
        self._remember("anything", target)
        if self._is_fetched(over):
            self._remember("fetched value", target)
        if not isinstance(over, cst.Call) or not isinstance(target, (cst.Tuple, cst.List)):
            return
        iterated = [argument.value for argument in positional(over)]
        if source(over.func) == "enumerate" and iterated and len(target.elements) == 2:
            self._iterated(target.elements[1].value, iterated[0])
        elif source(over.func) in ("zip", "itertools.zip_longest", "zip_longest"):
            for element, given in zip(target.elements, iterated, strict=False):
                self._iterated(element.value, given)

    def _is_fetched(self, value: cst.BaseExpression) -> bool:
        """Whether this is the list of fetched values."""
        return is_run(value) or self.holds("fetched values", value)

    def _kind_of(self, value: cst.BaseExpression) -> Kind | None:
        """The kind of a variable that is given ``value``; None if it is not known."""
        if is_run(value):
            return "fetched values"
        if isinstance(value, cst.Subscript) and index(value).lstrip("-").isdigit():
            return "fetched value" if self._is_fetched(value.value) else None
        if is_block(value):
            return "block"
        if isinstance(value, cst.BinaryOperation) and "value" in map(self._kind_of, (value.left, value.right)):
            return "value"
        if isinstance(value, cst.Name):  # another name of the same
            return next((kind for kind in _HANDED_ON if self.holds(kind, value)), None)
        name = self.name_of(value.func) if isinstance(value, cst.Call) else ""
        if _CONDITIONS.fullmatch(name):
            return "condition"
        if _VALUES.fullmatch(name):
            return "value"
        if name in ("paddle.distributed.fleet.DistributedStrategy", "fleet_train.DistributedStrategy"):
            return "strategy"
        if _PROGRAMS.fullmatch(name) or (isinstance(value, cst.Call) and self.clones_program(value)):
            return "program"
        return "build strategy" if name in _BUILD_STRATEGIES else None

    def _remember(self, kind: Kind, node: cst.BaseExpression) -> None:
        self.facts.variables[kind] |= self.defining_scopes(node)


class Transformer(Names, cst.CSTTransformer):
    """The base of the rewriting: the marks that it adds, and what its result needs.

    ``needed``: first parts of the names written. ``kept``: (import statement, bound name) that marked uses need.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.needed: set[str] = set()
        self.kept: set[tuple[cst.CSTNode, str]] = set()
        self._comments: dict[cst.CSTNode, list[str]] = {}

    def mark(self, node: cst.CSTNode, what: str, do: str) -> None:
        """A TODO line above the statement that ``node`` is in."""
        while not hasattr(node, "leading_lines") or isinstance(node, cst.Decorator):
            node = self.parent_of(node)
        self._comments.setdefault(node, []).append(calls.comment(what, do))

    def keep(self, meaning: Meaning) -> None:
        """The imports behind an old name that stays."""
        if is_old(meaning.name):
            self.kept |= {(binding.node, binding.name) for binding in meaning.imports}

    def visit_Module(self, node: cst.Module) -> None:
        self._first = (node.body[0], node.header) if node.body else None

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        result = super().on_leave(original_node, updated_node)
        comments = self._comments.get(original_node)
        if isinstance(result, cst.CSTNode):
            result = self._without_done(original_node, result, comments or [])
        if comments and self._first is not None and original_node is self._first[0]:
            comments = calls.not_in(self._first[1], comments)
        if not comments or not isinstance(result, (cst.CSTNode, cst.FlattenSentinel)):
            return result
        if isinstance(result, cst.FlattenSentinel):
            first, *others = result
            return cst.FlattenSentinel([_commented(first, comments), *others])
        return _commented(result, comments)

    def _without_done(self, original: cst.CSTNode, result: Any, due: list[str]) -> Any:
        """``result`` without TODO lines of an earlier run that are done."""
        if isinstance(result, (cst.IndentedBlock, cst.Module)):  # behind the last statement: what it was about is gone
            kept = [line for line in result.footer if not calls.is_mark(line)]
            result = result.with_changes(footer=kept) if len(kept) < len(result.footer) else result
        if isinstance(original, cst.Module) and self._first is not None:
            first = self._first[0]
            due, header = self._comments.get(first, []), result.header
            kept = calls.without_done(header, due, _head_of(first))
            return result.with_changes(header=kept) if len(kept) < len(header) else result
        if not hasattr(result, "leading_lines") or not any(map(calls.is_mark, result.leading_lines)):
            return result
        return result.with_changes(leading_lines=calls.without_done(result.leading_lines, due, _head_of(original)))


def _head_of(statement: cst.CSTNode) -> str:
    """The source text of a statement, without comments before it and without its block."""
    empty = statement.with_changes(leading_lines=[])
    body = getattr(statement, "body", None)
    return source(empty.with_changes(body=cst.IndentedBlock([])) if isinstance(body, cst.IndentedBlock) else empty)


def _commented(node: Any, comments: list[str]) -> Any:
    return node.with_changes(leading_lines=calls.with_marks(node.leading_lines, comments))


def is_run(node: cst.BaseExpression) -> bool:
    """Whether this is ``something.run(..., fetch_list=...)``, or ``something.run(program, feed, [...])``."""
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute) or node.func.attr.value != "run":
        return False
    if keyword(node, "fetch_list") is not None:
        return True
    plain = positional(node)
    return len(plain) > 2 and isinstance(plain[2].value, (cst.List, cst.Tuple))


def is_block(node: cst.BaseExpression) -> bool:
    """Whether this is ``program.global_block()`` or its like."""
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
        return False
    method = node.func.attr.value
    if method == "block":
        return bool(re.search(r"program(\(\))?$", source(node.func.value)))
    return method in ("global_block", "current_block")


def index(node: cst.Subscript) -> str:
    """The source text of a single index."""
    if len(node.slice) != 1 or not isinstance(node.slice[0].slice, cst.Index):
        return ""
    return source(node.slice[0].slice.value)


def parameter_arguments(call: cst.Call, name: str) -> list[cst.Arg]:
    """The arguments of a call that list parameters, of what Paddle has under ``name``."""
    if not name.startswith("paddle.") or name.endswith(".append_backward"):  # compat's takes names
        return []
    return [argument for argument in call.args if keyword_of(argument) in _PARAMETERS]


def parts_of(node: cst.CSTNode) -> list[str]:
    """``["fluid", "layers", "fc"]`` for ``fluid.layers.fc``; empty for anything but a chain of names."""
    if isinstance(node, cst.Name):
        return [node.value]
    if isinstance(node, cst.Attribute):
        front = parts_of(node.value)
        return [*front, node.attr.value] if front else []
    return []


def root_of(node: cst.CSTNode) -> cst.CSTNode:
    """The leftmost name of a chain."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return node
