"""Lines of a script for old Paddle, one function each, ported together: a pass over many lines costs as one."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

OLD_IMPORTS = """\
import os

import fleetx
import paddle
import paddle.fluid as fluid
"""
FLEET_IMPORTS = """\
from paddle.distributed import fleet
from paddle.distributed.fleet.base import role_maker
"""


def script(lines: Sequence[str], fleet: bool) -> str:
    """A script with these lines; ``fleet``: one that imports Fleet 2.x."""
    functions = [f"def case_{number}():\n{textwrap.indent(line, '    ')}\n" for number, line in enumerate(lines)]
    return "\n\n".join([OLD_IMPORTS + (FLEET_IMPORTS if fleet else ""), *functions])


def split(ported: str) -> list[str]:
    """What became of each line."""
    bodies = re.split(r"^def case_\d+\(\):\n", ported, flags=re.MULTILINE)[1:]
    return [textwrap.dedent(body).strip() for body in bodies]
