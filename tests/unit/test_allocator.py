from __future__ import annotations

import subprocess
import sys

from tests.support.processes import ROOT

CODE = """
from fleet_train.collectives.paddle_compat.allocator import keep_freed_memory
print(keep_freed_memory({}), keep_freed_memory({"GLIBC_TUNABLES": "glibc.malloc.check=3"}))
"""


def test_thresholds_are_raised_unless_the_user_has_set_them() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["True", "False"]
