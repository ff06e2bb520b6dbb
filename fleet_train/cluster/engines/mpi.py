"""MPI: the variables that ``mpirun`` of Open MPI, and Hydra of MPICH and Intel MPI, give to their processes.

Neither has a variable for the host of rank 0: `peers` finds it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

from fleet_train.cluster.engines.started import Started, Variables, checked

# As for Slurm: below the kernel's ephemeral ports, 64 for each job.
_FIRST_PORT, _PORTS_PER_JOB, _PLACES = 10_240, 64, 350


def read_open_mpi(environ: Mapping[str, str]) -> Started | None:
    """Open MPI 4 and 5 (docs.open-mpi.org, "Environment variables"), also under ``srun --mpi=pmix``."""
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    of = Variables(environ, "Open MPI")
    job = of.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid") or "unnamed"
    started = Started(
        engine="Open MPI",
        index=of.needed("OMPI_COMM_WORLD_RANK"),
        count=of.needed("OMPI_COMM_WORLD_SIZE"),
        local_index=of.needed("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_count=of.number("OMPI_COMM_WORLD_LOCAL_SIZE"),
        port=_port(job),
        job=f"openmpi-{_plain(job)}",
    )
    return checked(started, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")


def read_hydra(environ: Mapping[str, str]) -> Started | None:
    """MPICH, Intel MPI, MVAPICH: Hydra's variables. Slurm's own PMI sets PMI_RANK too, without the local numbers."""
    if not {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"} <= environ.keys():
        return None
    engine = "Intel MPI" if any(name.startswith("I_MPI_") for name in environ) else "MPICH (Hydra)"
    of = Variables(environ, engine)
    started = Started(
        engine=engine,
        index=of.needed("PMI_RANK"),
        count=of.needed("PMI_SIZE"),
        local_index=of.needed("MPI_LOCALRANKID"),
        local_count=of.number("MPI_LOCALNRANKS"),
        job="hydra",
    )
    return checked(started, "PMI_RANK", "PMI_SIZE")


def _port(job: str) -> int:
    return _FIRST_PORT + _PORTS_PER_JOB * (zlib.crc32(job.encode()) % _PLACES)


def _plain(job: str) -> str:
    return re.sub(r"[^A-Za-z0-9._@-]", "-", job)[:60]
