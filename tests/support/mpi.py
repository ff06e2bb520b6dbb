"""The two mpirun of Debian's packages, which can be installed side by side."""

from __future__ import annotations

import shutil

_PROGRAMS = ("mpirun.openmpi", "mpirun.mpich")


def why_no_mpi() -> str | None:
    """Why ranks cannot be started with both here; None where they can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"{', '.join(missing)} not found: apt-get install openmpi-bin libpmix2 mpich" if missing else None
