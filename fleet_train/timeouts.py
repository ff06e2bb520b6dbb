"""Durations of several modules, or that a test shortens, with the unit in their names and their reason beside them.

Use them as ``timeouts.NAME``, so that a test can shorten one. A duration of one module is a constant there.
"""

from __future__ import annotations

# The store and the rendezvous.
STORE_ANSWER_SECONDS = 30.0
"""How long an answer of the store that needs no waiting may take, and how much longer than the server's own timeout one
that needs it. A process that has ended or a machine that is gone is noticed by the kernel (TCP_USER_TIMEOUT, 20 s); a
server that is alive may stand still for longer than 10 s where a machine swaps or a hypervisor pauses it, and then the
job must go on."""
STORE_RETRY_SECONDS = (0.02, 0.5)
"""Pause between two attempts to reach a server: after the first one, and at most."""
STORE_DIAL_SECONDS = 5.0
"""How long a server may take to accept a connection: two round trips, and some lost packets."""

# Collectives.
COLLECTIVE_TIMEOUT_SECONDS = 300.0
"""How long a collective may take while no other ends, unless the profile or the job says otherwise."""
COLLECTIVE_MARGIN_SECONDS = 60.0
"""How much longer than its timeout a wait for a collective lasts before it is an error: Gloo's own timeout of 30 s and
the search for missing ranks come first and report more."""
THREAD_END_SECONDS = 1.0
"""How long an engine's threads may take to end: one that is inside a call of a lost rank never does."""
LEAVE_SECONDS = 60
"""How long a rank that leaves waits for its device, and then for the other ranks to leave."""
WATCHDOG_POLL_SECONDS = 0.1
"""Pause between two looks of the watchdog at what is in flight."""
WATCHDOG_ASK_SECONDS = 2.0
"""How long a collective waits before its rank asks the store who is missing, and how often it asks then. Less than half
of an attribution: a rank whose own timeout has not passed must learn of an attribution that another rank has started,
and join it in time."""
EARLY_ATTRIBUTION_SECONDS, ATTRIBUTION_SECONDS = 1.5, 3.5
"""How long live ranks have to report after a collective failed, before witnesses are asked where the others stand, and
from then on, before they count as missing: at once if none of them waits for other ranks."""
QUICK_STEP_SECONDS = 1.0
"""How long a step may take at most to go without a barrier: in between, Gloo's own timeout of 30 s applies."""

# The flight recorder and its witness.
STACKS_ASK_SECONDS, STACKS_ASK_AGAIN_SECONDS = 4.0, 0.1
"""How long a rank that misses others waits to learn where they stand, and how often it looks: a witness asks the store
twice a second, and a rank has its time to answer."""

# Training, checkpoints and metrics.
RANKS_SYNC_SECONDS = 1.0
"""Pause between two synchronization points of all ranks while one of them waits for its disk or for a transfer: after a
longer silence they would consider it lost."""
CHECKPOINT_SECONDS = 1800.0
"""Default of ``--checkpoint_timeout``: a slow disk may need long for large tensors, and a hanging one must not block
the job forever."""
FOLDER_HERE_SECONDS = 10.0
"""How long to wait for the end of a process of this machine that has the folder of checkpoints: one that is being
killed, such as an earlier attempt's, still holds it for a moment."""
SAME_STOP_SECONDS = 2.0
"""How far apart stopping signals of one request may come: Slurm and a launcher both pass theirs on to a rank."""

# Launching and spawning.
REJOIN_SECONDS = 300.0
"""Default of ``--rejoin_timeout``, for a lost node or node 0's launcher to come back: a machine starts in that time."""
LOST_NODE_SECONDS = 20.0
"""Default of ``--lost_node_timeout``: longer than a launcher on a busy machine is silent."""
GRACEFUL_STOP_SECONDS = 30.0
"""Default of ``--grace_seconds``, for ranks to save their state after SIGTERM; as long as Kubernetes waits."""
WATCH_TICK_SECONDS = 0.05
"""How often a launcher looks at its ranks, and a selftest's supervisor at its subject."""
ASK_STORE_SECONDS = 0.5
"""How often supervisors of ranks ask the job's store for reports (seldomer in a job of many nodes), and for other
supervisors."""
STORE_QUESTIONS_PER_SECOND = 250
"""How often the launchers of all nodes together ask the store: a leader serves its ranks as well."""
LIST_CONNECTIONS_SECONDS = 10.0
"""How often connections to the job's endpoints are listed: one that ends is listed for another minute."""
ROOT_CAUSE_SECONDS = 2.0
"""How long a failure that may be secondary (another rank was lost) waits for its root cause."""
FAILED_RANK_EXIT_SECONDS = 5.0
"""How long a rank whose failure the store knows has to exit, with its exit code and last lines. Exit handlers and
threads may take longer; then the launcher stops it."""
FOLLOWERS_SECONDS = 2.0
"""How long ranks that lose another one have to report it and to print their last line. A rank that they miss (frozen,
in a loop) does not exit by itself."""
OTHERS_LAST_LINE_SECONDS = 1.0
"""How long a process that misses a rank has to print its message, before the launchers stop it."""
FAILURE_NEWS_SECONDS = 3.0
"""How much longer the launcher of another node may need to report how a rank ended that failed or was lost."""
STOP_NEWS_SECONDS = 5.0
"""How much longer than another node's grace the notice of its end may take."""
RANKS_START_SECONDS = 20.0
"""How long ranks may take to start, and to have a handler for SIGTERM."""
OTHER_RESULTS_SECONDS = 20.0
"""How long the other nodes have to report how their ranks ended: longer than everything they wait for themselves."""
SLOW_EXIT_SECONDS = 30.0
"""How long after a rank has ended with 0 its launcher says where those stand that still run."""
OTHERS_STOP_SECONDS = 30.0
"""How long the ranks of other nodes may take to stop after this node's ranks have stopped gracefully."""
LAUNCHERS_LEAVE_SECONDS = 12.0
"""How long the leader keeps the store at the end for launchers that are still connected."""
LEAVE_NOTICE_SECONDS = 1.5
"""How long launchers that still run have to see that this one left properly: three times they ask."""
STOP_GRACE_SECONDS = 3.0
"""How long a process has to end after SIGTERM, before SIGKILL. A graceful stop has another bound, its sender's."""
KILL_SECONDS = 3.0
"""How long a process may take to end after SIGKILL: one that hangs in a call of the kernel longer counts as ended."""
PROCESS_POLL_SECONDS = 0.02
"""How often processes that were told to end are looked at."""
SIGNAL_RACE_SECONDS = 0.05
"""How long a rank's end may be ahead of a launcher's own signal: one to all processes comes in any order."""
END_RECORD_SECONDS = 2.0
"""How long the end waits for records that are being written; the disk may not answer."""
TERMINAL_ORDER_SECONDS = 0.5
"""How long later lines of one stream wait for earlier ones of the other, unless stuck: one screen shows both."""
TERMINAL_STUCK_SECONDS = 2.0
"""How long the end waits for a reader of the output that does not read."""
TERMINAL_SLOW_SECONDS = 10.0
"""How long the end waits for a reader of the output that reads slowly."""
LAUNCHERS_POLL_SECONDS = 0.2
"""How often a launcher asks the leader while it waits; seldomer in a job of many nodes."""
FIND_LEADER_SECONDS = 0.5
"""How often a launcher without a leader asks all others."""
CHECK_OTHER_LEADER_SECONDS = 2.0
"""How often a leader that waits for nodes checks whether they follow another leader."""
SIGNPOST_SECONDS = 1.0
"""How often a launcher that waits looks for others with different flags."""
SIGNPOST_BUSY_SECONDS = 30.0
"""How long a refused launcher's few looks may take on a busy machine, before it ends without them."""
ASK_LAUNCHER_SECONDS = 1.0
"""How long another launcher has to report its state, before it counts as silent."""
LEADER_BUSY_SECONDS = 40.0
"""The leader's time besides waiting for nodes: stopping ranks, collecting how the others ended, the pause."""
ATTEMPT_PROGRESS_SECONDS = 600.0
"""How long an attempt has to run to have made progress: the same failure may then have another cause."""
LONGEST_RESTART_PAUSE_SECONDS = 8.0
"""The longest pause between two attempts: 1, 2, 4 seconds and so on, up to this."""
FIRST_WAITING_SECONDS = 2.0
"""How long a launcher waits before it reports that it waits."""
REPORT_WAITING_SECONDS = 10.0
"""How often a launcher that still waits reports it again."""
RESOLVE_NAMES_SECONDS = 1.0
"""How often the names of pods that are not running yet are looked up."""
COMPARE_FOLDERS_SECONDS = 60.0
"""How long all nodes may take to mark their log folders: a network file system may be slow."""
TOOL_SECONDS = 30.0
"""How long a command of the system may take: git, or nvidia-smi, which all ranks of a machine may ask at once."""
SPAWN_EXIT_SECONDS = 20.0
"""How long a rank of ``spawn`` whose call has returned may wait for its threads."""

# Doctor, selftest and recommend.
DOCTOR_JOIN_SECONDS, DOCTOR_MOST_JOIN_SECONDS = 20.0, 600.0
"""Default of the doctor's ``--join_timeout``, and its maximum."""
DOCTOR_PAIRS_SECONDS = 14.0
"""How long the measurements of all pairs of nodes may take."""
DOCTOR_EXCHANGE_SECONDS, DOCTOR_LEAVE_SECONDS = 12.0, 4.0
"""How long the other doctors' reports may take to arrive; how long all others may take to read them."""
DOCTOR_ANSWER_SECONDS = 4.0
"""How long another doctor's next message may take."""
DOCTOR_CONNECT_SECONDS = 2.5
"""How long a connection to another doctor may take: a lost first packet is retransmitted after 1 s."""
DOCTOR_ROUND_SECONDS = 6.0
"""How long a round of pairs waits for a node that is still busy with the last one."""
DOCTOR_STORE_SECONDS, DOCTOR_POLL_SECONDS = 8.0, 0.05
"""How long node 0's store, on a busy machine, may take to answer; pause between two looks at what is in it."""
DOCTOR_SPEED_SECONDS, DOCTOR_SPEED_PROCESS_SECONDS = 0.8, 8.0
"""How long a processor is measured, and how long the process that does it may take: numpy's import takes longer on a
busy machine."""
DATA_DISK_SECONDS, DATA_LOADER_SECONDS = 3.0, 15.0
"""How long files of a data folder are read past the page cache; how long a loader is measured, which may not become
steady."""
DATA_WINDOW_SECONDS = 2.0
"""How long each of a loader's compared windows is: batches come unevenly, and its workers take seconds to start."""
DOCTOR_DATA_SECONDS = 40.0
"""How long measuring a data folder may take: its disk, its loader, listing it, and the start of the workers."""
DOCTOR_IP_SECONDS, DOCTOR_NVIDIA_SMI_SECONDS = 2.0, 10.0
"""How long an answer of ``ip`` may take, and one of ``nvidia-smi``, which hangs with its driver."""
SELFTEST_SECONDS, SELFTEST_SECONDS_PER_RANK = 900.0, 10.0
"""How long the checks that share a job may take. Nothing in them waits for longer than its own timeout; the simulation
takes longer with more ranks."""
SELFTEST_STEP_SECONDS = 300.0
"""How long a step of the selftest's ladder may take: importing Paddle, joining, some tens of steps."""
SELFTEST_FAULT_COMES_SECONDS = 180.0
"""How long a job that fails on purpose may take to start: importing Paddle, joining, a few steps."""
SELFTEST_FAULT_GRACE_SECONDS = 10.0
"""How much longer than the profile's collective_timeout_seconds a job with a lost rank may take to end: detection,
diagnosis and exit."""
SELFTEST_KILLED_LATER_SECONDS = 5.0
"""How long after the bound a selftest's subjects are waited for: those that have not ended then will not."""
SELFTEST_COLLECTIVE_SECONDS = 30.0
"""How long one collective of a few kilobytes may take."""
SELFTEST_TRAINING_SECONDS = 60
"""The profile's collective_timeout_seconds in trainings that are not to fail: a busy machine must not end them."""
SELFTEST_SIMULATION_SECONDS = 600.0
"""How long rank 0 may simulate all ranks; the others wait for it."""
SELFTEST_DELAY_SECONDS = 0.004
"""The longest random delay of a rank's step: several times what a small step takes."""
SELFTEST_COMPUTE_ON_SECONDS = 120.0
"""How long a rank that skips collectives computes alone: far beyond the bound for the others' end."""
RECOMMEND_START_SECONDS = 60.0
"""How long a trial may take besides its steps: for importing Paddle, joining and a first step on a busy machine."""
RECOMMEND_MEASURE_SECONDS = 4.0
"""How long the links are measured."""
RECOMMEND_COMPUTE_SECONDS, RECOMMEND_TRIAL_SECONDS = 4.0, 4.0
"""How long the script's steps alone are measured, and how long those of a trial."""
