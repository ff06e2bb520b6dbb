"""Every duration of this package, with its unit in its name and its reason beside it.

Use them as ``timeouts.NAME``, so that a test can shorten one. What a user can set (``--join_timeout``,
``collective_timeout_seconds``, ``--lost_node_timeout``, ...) has its default here too.
"""

from __future__ import annotations

# cluster and its store

# collectives

# convert

# data

DECODE_TASK_SECONDS = 120.0
"""How long one task (a few images) may take before its worker counts as hanging: a network file system may pause."""
WORKERS_REPLACED_SECONDS = 3600.0
"""Workers that were replaced longer ago than this do not count any more."""
WORKERS_POLL_SECONDS = 0.5
"""How long a loader waits for an answer before it looks for silent workers and for the end of its epoch."""
WORKERS_DRAIN_SECONDS = 3.0
"""How long an epoch that is left may wait for the tasks that workers have begun, so that they can be kept."""
WORKER_END_SECONDS = 5.0
"""How long a worker whose socket is closed may take to end, and a killed one to be gone."""
WORKER_CLOSE_SECONDS = 2.0
"""The same for a whole pool that is closed, which a user waits for."""
PREFETCH_PUT_SECONDS = 0.05
"""How often a prefetch thread whose queue is full looks whether its consumer has gone."""

# train

# launch

# spawn and Ray

# doctor

# selftest

# recommend

# profile, plan and command line

# manifests

POD_END_SECONDS = 20
"""After --grace_seconds: notifying the other nodes, stopping remaining processes, writing the report. Whole seconds."""
BATCH_END_SECONDS = 30
"""The same under Slurm, where srun waits for the launchers of all nodes."""
