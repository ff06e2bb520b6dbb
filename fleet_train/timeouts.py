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

# launch

REJOIN_SECONDS = 300.0
"""``--rejoin_timeout``: for a lost node, or the launcher of node 0, to come back: a machine starts in that time."""
LOST_NODE_SECONDS = 20.0
"""``--lost_node_timeout``: longer than a launcher on a busy machine is silent."""
GRACEFUL_STOP_SECONDS = 30.0
"""``--grace_seconds``: for ranks to save their state after SIGTERM; Kubernetes waits as long by default."""
WATCH_TICK_SECONDS = 0.05
"""How often a launcher, and ``spawn``, looks at its ranks."""
ASK_STORE_SECONDS = 0.5
"""How often they ask the job store for reports; seldomer in a job of many nodes."""
LIST_CONNECTIONS_SECONDS = 10.0
"""How often connections to the job's endpoints are listed: one that ends is listed for another minute."""
ROOT_CAUSE_SECONDS = 2.0
"""How long a failure that may be secondary (another rank was lost) waits for its root cause."""
FAILED_RANK_EXIT_SECONDS = 5.0
"""A rank whose failure the store knows is about to exit: for its exit code and last lines. Exit handlers and threads
may take longer; then the launcher stops it."""
MISSED_RANK_SECONDS = 2.0
"""A rank that others report as missing (frozen, in a loop) does not exit by itself: the time for those that report."""
OTHERS_LAST_LINE_SECONDS = 1.0
"""For a process that misses a rank to print its message, before the launchers stop it."""
FAILURE_NEWS_SECONDS = 3.0
"""How much longer the launcher of another node may need to report how such a rank ended."""
STOP_NEWS_SECONDS = 5.0
"""In addition to another node's grace: how long the notice of its end may take."""
RANKS_START_SECONDS = 20.0
"""Before that, ranks may still be starting and have no handler for SIGTERM."""
OTHER_RESULTS_SECONDS = 20.0
"""For the other nodes to report how their ranks ended: longer than all of the above together."""
OTHERS_STOP_SECONDS = 30.0
"""After this node's ranks stopped gracefully: for those of the others."""
LAUNCHERS_LEAVE_SECONDS = 12.0
"""At the end, the leader keeps the store for launchers that are still connected."""
LEAVE_NOTICE_SECONDS = 1.5
"""For launchers that are still running to see that this one left properly: three times they ask."""
STOP_GRACE_SECONDS = 3.0
"""After SIGTERM, for a process that has to end; then SIGKILL. A graceful stop has another bound, its sender's."""
KILL_SECONDS = 3.0
"""After SIGKILL: a process that hangs in a call of the kernel longer counts as ended."""
PROCESS_POLL_SECONDS = 0.02
"""How often processes that were told to end are looked at."""
SIGNAL_RACE_SECONDS = 0.05
"""A signal to all processes of a job reaches a rank and its launcher in any order."""
END_RECORD_SECONDS = 2.0
"""At the end, for records that are being written; the disk may not answer."""
TERMINAL_ORDER_SECONDS = 0.5
"""One screen shows both streams: later lines of one wait for earlier lines of the other, unless that is stuck."""
TERMINAL_STUCK_SECONDS = 2.0
"""At the end: for a reader that does not read."""
TERMINAL_SLOW_SECONDS = 10.0
"""At the end: for a reader that reads slowly."""
LAUNCHERS_POLL_SECONDS = 0.2
"""How often a launcher asks the leader while it waits; seldomer in a job of many nodes."""
FIND_LEADER_SECONDS = 0.5
"""How often a launcher without a leader asks all others."""
CHECK_OTHER_LEADER_SECONDS = 2.0
"""How often a leader that waits for nodes checks whether they follow another leader."""
ASK_LAUNCHER_SECONDS = 1.0
"""For another launcher to report its state; then it is silent."""
LEADER_BUSY_SECONDS = 40.0
"""The leader's time besides waiting for nodes: stopping ranks, collecting how the others ended, the pause."""
ATTEMPT_PROGRESS_SECONDS = 600.0
"""An attempt that ran this long has made progress: the same failure may have another cause."""
LONGEST_RESTART_PAUSE_SECONDS = 8.0
"""Between attempts: 1, 2, 4 and so on, up to this."""
FIRST_WAITING_SECONDS = 2.0
"""A wait that is longer is reported."""
REPORT_WAITING_SECONDS = 10.0
"""... and reported again this often."""
RESOLVE_NAMES_SECONDS = 1.0
"""How often the names of pods that are not running yet are looked up."""
COMPARE_FOLDERS_SECONDS = 60.0
"""For all nodes to mark their log folders: a network file system may be slow."""
TOOL_SECONDS = 30.0
"""For a command of the system: git, nvidia-smi."""

# spawn and Ray

SPAWN_FOLLOWERS_SECONDS = 2.0
"""After a rank has failed by itself: for the others to print their last line, and for it to exit."""
SPAWN_ROOT_CAUSE_SECONDS = 4.0
"""After a failure that may be secondary (another rank was lost): for the root cause to arrive."""
SPAWN_EXIT_SECONDS = 20.0
"""A rank whose call has returned may wait for its threads, but not forever."""
SPAWN_ANSWER_SECONDS = 5.0
"""For the store, which is in the same process."""

# doctor

# selftest

# recommend

# profile, plan and command line

# manifests
