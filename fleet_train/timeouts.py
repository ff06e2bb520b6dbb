"""Every duration of this package, with its unit in its name and its reason beside it.

Use them as ``timeouts.NAME``, so that a test can shorten one. What a user can set (``--join_timeout``,
``collective_timeout_seconds``, ``--lost_node_timeout``, ...) has its default here too.
"""

from __future__ import annotations

# cluster and its store

# collectives

# convert

# data

# train
RANKS_SYNC_SECONDS = 1.0
"""Between two synchronization points of all ranks while one of them waits for its disk or for a transfer: after a
longer silence they would consider it lost."""
CHECKPOINT_SECONDS = 1800.0
"""Default of ``--checkpoint_timeout``: a slow disk may need long for large tensors, and a hanging one must not block
the job forever."""
FOLDER_HERE_SECONDS = 10.0
"""For the end of a process of this machine that has the folder of checkpoints: one that is being killed, such as an
earlier attempt's, still holds it for a moment."""
FOLDER_ELSEWHERE_SECONDS = 120.0
"""The same on another machine: a file server releases the lock of one that lost its power after a minute and a half."""
FOLDER_POLL_SECONDS = 0.2
COPIES_FINISH_SECONDS = 300.0
"""For copies of checkpoints under way at the end of a training."""
COPIES_STOP_SECONDS = 20.0
"""The same at a graceful stop, below the launcher's grace period of 30 s."""
COPY_CONNECT_SECONDS = 10.0
"""To connect to a receiver of copies, and for it to prove that it knows the token."""
COPY_HANDSHAKE_SECONDS = 5.0
"""For a caller to prove to a receiver that it knows the token."""
COPY_STALL_SECONDS = 30.0
"""For one message, or one piece of a file, to be sent; or for the answer to a quick request."""
COPY_PLACING_SECONDS = 120.0
"""For the receiver to sync the data and to remove old checkpoints."""
COPY_ACCEPT_AGAIN_SECONDS = 0.1
"""After a receiver could not accept a connection (too many open files): there will be fewer."""
STRAGGLER_SECONDS = 5.0
"""The least time for which a rank must be slower than the others: less may be a checkpoint, or load for a moment."""
PROGRESS_LINE_SECONDS = 10.0
"""Between two progress lines within an epoch, in a log."""
SAME_STOP_SECONDS = 2.0
"""Stopping signals within this time are one request: Slurm and a launcher both pass theirs on to a rank."""
VISUALDL_START_SECONDS = 30.0
"""For VisualDL's page to answer; importing it reads much from the disk."""
VISUALDL_ANSWER_SECONDS = 5.0
"""For one answer of it meanwhile."""
VISUALDL_POLL_SECONDS = 0.1
VISUALDL_STOP_SECONDS = 5.0
"""For its processes to end after SIGTERM."""
METRICS_SILENT_SECONDS = 5.0
"""For a client of the Prometheus server to send its request."""
METRICS_POLL_SECONDS = 0.1
"""Of that server, to see that it is to close."""
METRICS_ASK_AGAIN_SECONDS = 1.0
"""Between two questions to the job's store which ranks are gone: scrapes may come more often."""

# launch

# spawn and Ray

# doctor

# selftest

# recommend

# profile, plan and command line

# manifests
