"""Import statements: old ones go unless a marked use needs them, new ones come in their place."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TypeVar

import libcst as cst

from fleet_train.port import calls
from fleet_train.port.calls import source
from fleet_train.port.index import is_old

Statement = TypeVar("Statement", cst.Import, cst.ImportFrom)
Kept = Collection[tuple[cst.CSTNode, str]]
_KEPT = calls.comment("an import of old Paddle", "remove it with the last marked line below that needs it")


def with_new_imports(module: cst.Module, kept: Kept, needed: Collection[str]) -> cst.Module:
    """``module`` without old imports, but with ``needed`` (first parts of the new names) where the old ones were."""
    cleaner = _Cleaner(module, kept)
    cleaned = module.visit(cleaner)
    wanted = set(needed) | ({"paddle"} if cleaner.bound_paddle else set())
    lines = _statements(wanted - _bound(cleaned.body))
    body, comments = list[cst.BaseStatement | cst.SimpleStatementLine](), list[cst.EmptyLine]()
    for statement in cleaned.body:
        if id(statement) in cleaner.places:
            leading = [*comments, *_leading(statement)]
            body += _led(lines, leading)
            comments = [] if lines else [line for line in leading if line.comment]
            lines = []
        else:
            body.append(_led([statement], [*comments, *_leading(statement)])[0] if comments else statement)
            comments = []
    at = 0 if not lines else _behind_paddle(body)
    return cleaned.with_changes(body=[*body[:at], *lines, *body[at:]])


def with_static_mode(module: cst.Module) -> cst.Module:
    """``module`` with ``paddle.enable_static()`` behind its first imports: programs of 1.x were static by default."""
    at = _behind_imports(module.body)
    line = cst.parse_statement("\npaddle.enable_static()\n")
    return module.with_changes(body=[*module.body[:at], line, *module.body[at:]])


class _Cleaner(cst.CSTTransformer):
    """Takes old names out; a statement of the module that loses all of its names becomes a place for new ones."""

    def __init__(self, module: cst.Module, kept: Kept) -> None:
        super().__init__()
        self._top, self._kept = {id(one) for one in module.body}, kept
        self._first, self._header = module.body[0] if module.body else None, module.header
        self.bound_paddle = False
        self._places: list[cst.SimpleStatementLine] = []

    @property
    def places(self) -> set[int]:
        """Identities of the statements that stand where all names went."""
        return {id(one) for one in self._places}

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import | cst.RemovalSentinel:
        left = []
        for alias in original_node.names:
            bound = alias.evaluated_alias or alias.evaluated_name.split(".")[0]
            if not is_old(alias.evaluated_name) or (original_node, bound) in self._kept:
                left.append(alias)
            else:
                self.bound_paddle |= bound == "paddle"
        return _with_names(updated_node, left)

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom | cst.RemovalSentinel:
        if isinstance(original_node.names, cst.ImportStar) or original_node.relative or original_node.module is None:
            return updated_node
        module = source(original_node.module)
        left = [
            alias
            for alias in original_node.names
            if not is_old(f"{module}.{alias.evaluated_name}")
            or (original_node, alias.evaluated_alias or alias.evaluated_name) in self._kept
        ]
        return _with_names(updated_node, left)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        if not updated_node.body:
            if id(original_node) not in self._top:
                return cst.RemoveFromParent()
            place = updated_node.with_changes(body=[cst.Pass()])
            self._places.append(place)
            return place
        if any(node is one for node, _ in self._kept for one in original_node.body):
            new = calls.not_in(self._header, [_KEPT]) if original_node is self._first else [_KEPT]
            return updated_node.with_changes(leading_lines=calls.with_marks(updated_node.leading_lines, new))
        return updated_node


def _with_names(statement: Statement, left: Sequence[cst.ImportAlias]) -> Statement | cst.RemovalSentinel:
    assert not isinstance(statement.names, cst.ImportStar)
    if not left:
        return cst.RemoveFromParent()
    if len(left) == len(statement.names):
        return statement
    last = left[-1].with_changes(comma=statement.names[-1].comma)
    return statement.with_changes(names=[*left[:-1], last])


def _leading(statement: cst.BaseStatement | cst.SimpleStatementLine) -> list[cst.EmptyLine]:
    return list(getattr(statement, "leading_lines", ()))


def _led(statements: Sequence[cst.BaseStatement], leading: Sequence[cst.EmptyLine]) -> list[cst.BaseStatement]:
    """The statements, ``leading`` in front of the first."""
    if not statements:
        return []
    first = statements[0].with_changes(leading_lines=list(leading))
    return [first, *statements[1:]]


def _statements(names: Collection[str]) -> list[cst.BaseStatement]:
    ours = sorted(set(names) - {"paddle"})
    texts = ["import paddle\n"] if "paddle" in names else []
    texts += [f"from fleet_train import {', '.join(ours)}\n"] if ours else []
    return [cst.parse_statement(text) for text in texts]


def _bound(body: Sequence[cst.BaseStatement | cst.SimpleStatementLine]) -> set[str]:
    """Names that ``import x`` and ``from fleet_train import x`` bind at the top of the module."""
    found = set[str]()
    for statement in body:
        for one in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
            if isinstance(one, cst.Import):
                found |= {alias.evaluated_name.split(".")[0] for alias in one.names if not alias.asname}
            elif isinstance(one, cst.ImportFrom) and one.module is not None and source(one.module) == "fleet_train":
                names = () if isinstance(one.names, cst.ImportStar) else one.names
                found |= {alias.evaluated_name for alias in names if not alias.asname}
    return found


def _is_import(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and all(
        isinstance(one, (cst.Import, cst.ImportFrom)) for one in statement.body
    )


def _is_docstring(statement: cst.CSTNode) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine) or not isinstance(statement.body[0], cst.Expr):
        return False
    return isinstance(statement.body[0].value, (cst.SimpleString, cst.ConcatenatedString))


def _behind_future(body: Sequence[cst.BaseStatement | cst.SimpleStatementLine]) -> int:
    at = 1 if body and _is_docstring(body[0]) else 0
    while at < len(body) and _is_import(body[at]) and "__future__" in source(body[at]):
        at += 1
    return at


def _behind_paddle(body: Sequence[cst.BaseStatement | cst.SimpleStatementLine]) -> int:
    """Behind the first import of Paddle: what a script sets for Paddle in front of it has to stay in front."""
    for at, statement in enumerate(body):
        if _is_import(statement) and re.search(r"\b(import|from) paddle\b", source(statement)):
            return at + 1
    return _behind_future(body)


def _behind_imports(body: Sequence[cst.BaseStatement | cst.SimpleStatementLine]) -> int:
    """Behind the last import before the first statement that does something else; behind `import paddle` at least."""
    at = last = 1 if body and _is_docstring(body[0]) else 0
    while at < len(body) and (_is_import(body[at]) or isinstance(body[at], (cst.Try, cst.If))):
        if _is_import(body[at]):
            last = at + 1
        at += 1
    paddle = [i for i, one in enumerate(body) if _is_import(one) and "paddle" in _bound([one])]
    return max([last, *(i + 1 for i in paddle[:1])])
