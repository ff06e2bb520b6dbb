"""Whether machines can be emulated here (``tools/lab.py``)."""

from __future__ import annotations

import functools
import subprocess
import uuid

from tools.lab import why_no_lab


@functools.cache
def why_no_namespaces() -> str | None:
    """Why this process cannot make network namespaces, or None when it can."""
    if reason := why_no_lab():
        return reason
    name = f"ft-probe-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"cannot make a network namespace: {made.stderr.strip()}"
    # Below a root that is no mount point they can be made and not be entered.
    entered = subprocess.run(["ip", "-n", name, "link"], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return f"cannot enter a network namespace: {entered.stderr.strip()}" if entered.returncode != 0 else None
