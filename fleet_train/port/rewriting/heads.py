"""Names as they are written and shown: the import that a new one needs, the display form of an old one."""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst

from fleet_train.port.rewriting.calls import ACTIVATIONS, source
from fleet_train.port.tables.index import FLEET, canonical
from fleet_train.port.tables.rules import To

# The first part of a new name, and the module that brings it.
HEADS = {
    "paddle": "paddle",
    "compat": "fleet_train.compat",
    "fleet": "fleet_train.fleet",
    "role_maker": "fleet_train.role_maker",
    "DistributedStrategy": "fleet_train.DistributedStrategy",
}
_WRAPPERS = set(ACTIVATIONS.values())


def shown(name: str) -> str:
    """A full name as people know it."""
    name = canonical(name)
    return (
        name.removeprefix("paddle.") if name.startswith("paddle.fluid.") else name.removeprefix("paddle.distributed.")
    )


def brings(head: str) -> Callable[[str], bool]:
    """Whether an import of this name may share ``head``: ours, or an old one that the new one replaces."""
    if head == "paddle":
        return lambda name: name == "paddle"
    return lambda name: (
        canonical(name)
        in {
            "paddle.distributed.fleet" if head == "fleet" else "",
            f"{FLEET}base.role_maker" if head == "role_maker" else "",
            f"{FLEET}DistributedStrategy" if head == "DistributedStrategy" else "",
        }
    )


def call_of(rule: To) -> str:
    return rule.new or " or ".join(dict.fromkeys(rule.targets))


def outer_names(node: cst.BaseExpression) -> list[str]:
    """The new names at the top of a rewritten call: the called one, those wrapped around it."""
    found = list[str]()
    while True:
        if isinstance(node, cst.Call):
            if isinstance(node.func, (cst.Name, cst.Attribute)) and source(node.func).partition(".")[0] in HEADS:
                found.append(source(node.func))
            if (
                len(node.args) == 1
                and node.args[0].keyword is None
                and isinstance(node.args[0].value, cst.Call)
                and found
                and found[-1] in _WRAPPERS
            ):
                node = node.args[0].value
                continue
            return found
        if isinstance(node, cst.Attribute):
            node = node.value
            continue
        return found
