"""RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: of torchrun, PyTorchJob, Volcano's plugin, and of hand-made scripts.

Sources: pytorch.org "torchrun (Elastic Launch)", "Environment variables"; volcano-sh/volcano
``pkg/controllers/job/plugins/distributed-framework/pytorch``. Volcano and PyTorchJob count pods, torchrun ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from fleet_train.cluster.engines.started import Started, Variables, checked


def read(environ: Mapping[str, str]) -> Started | None:
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environ.keys():
        return None
    by_torchrun = "TORCHELASTIC_RUN_ID" in environ
    of = Variables(environ, "torchrun" if by_torchrun else "RANK and WORLD_SIZE")
    port = of.port("MASTER_PORT")
    if port is not None and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1  # torchrun's own store listens at MASTER_PORT
    started = Started(
        engine="torchrun" if by_torchrun else "whoever set RANK and WORLD_SIZE",
        index=of.needed("RANK"),
        count=of.needed("WORLD_SIZE"),
        local_index=of.number("LOCAL_RANK") or 0,
        local_count=of.number("LOCAL_WORLD_SIZE"),
        node=of.number("GROUP_RANK"),
        master=of.text("MASTER_ADDR"),
        port=port,
        job=f"torchrun-{of.text('TORCHELASTIC_RUN_ID') or of.text('MASTER_ADDR')}",
    )
    return checked(started, "RANK", "WORLD_SIZE")
