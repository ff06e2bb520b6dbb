"""Every duration of this package, with its unit in its name and its reason beside it.

Use them as ``timeouts.NAME``, so that a test can shorten one. What a user can set (``--join_timeout``,
``collective_timeout_seconds``, ``--lost_node_timeout``, ...) has its default here too.
"""

from __future__ import annotations

# The store and the rendezvous.
SCONTROL_SECONDS = 20.0
"""Slurm's controller answers ``scontrol show node`` at once, or is overloaded."""
STORE_ANSWER_SECONDS = 30.0
"""For an answer of the store that needs no waiting, and beyond the server's own timeout for one that does. A process
that has ended or a machine that is gone is noticed by the kernel (TCP_USER_TIMEOUT, 20 s); a server that is alive may
stand still for longer than 10 s where a machine swaps or a hypervisor pauses it, and then the job must go on."""
STORE_TICK_SECONDS = 0.05
"""How exactly the store keeps timeouts."""
STORE_REQUEST_SECONDS = 10.0
"""For a request of another thread of its process to the store's thread, which does nothing that takes longer."""
STORE_INNER_NAMESPACE_SECONDS = 30.0
"""How long a relay tries to open a namespace within another one: its parent answers already."""
STRANGERS_SECONDS = 5.0
"""From a connection to its proof that it belongs to the job: one exchange of messages."""
NAMES_SECONDS = 2.0
"""Between two attempts to resolve host names of the node list; a strange connection must not cause more."""
CROSSED_SECONDS = 1.0
"""How long all members may wait at different barriers before that is an error and no coincidence."""
RELAY_PARTIAL_SECONDS = 1.0
"""How long members may be late before a relay's parent gets a list of those that have arrived."""
RELAY_UPDATE_SECONDS = 0.1
"""After that: how long further arrivals are collected."""
RELAY_GRACE_SECONDS = 2.0
"""Beyond a waiter's timeout: for the parent to name the missing members."""
STORE_RETRY_SECONDS = (0.02, 0.5)
"""Between two attempts to reach a server: after the first one, and at most."""
STORE_DIAL_SECONDS = 5.0
"""For accepting a connection: two round trips, and some lost packets."""
STORE_OUTLIVES_SECONDS = 300.0
"""How long the store's process stays for connected members after its parent has ended."""
STORE_QUIET_SECONDS = 0.5
"""Without members until it ends then: one that lost its connection may reconnect to report."""
STORE_POLL_SECONDS = 0.05
"""Between two looks at that."""

# Collectives.
COLLECTIVE_TIMEOUT_SECONDS = 300.0
"""How long a collective may take while no other ends, unless the profile or the job says otherwise."""
COLLECTIVE_MARGIN_SECONDS = 60.0
"""Beyond a collective's timeout: Gloo's own timeout of 30 s and the search for missing ranks come first and report
more."""
THREAD_END_SECONDS = 1.0
"""For an engine's threads to end: one that is inside a call of a lost rank never does."""
FIRST_DEVICE_POLL_SECONDS = 20e-6
DEVICE_POLL_SECONDS = 2e-3
"""Between two looks at whether a device is done, at first and at most: a blocking wait would hold Python's lock."""
LEAVE_SECONDS = 60
"""How long a rank that leaves waits for its device, and then for the other ranks to leave."""
VERIFY_SECONDS = 1800.0
"""How long rank 0 may compute with the joint batch, for which the other ranks wait: a step of all of them, twice."""
WATCHDOG_POLL_SECONDS = 0.1
"""Between two looks of the watchdog at what is in flight."""
WATCHDOG_ASK_SECONDS = 2.0
"""After a collective has waited this long, ask the store, and then as often. Less than half of an attribution: a
rank whose own timeout has not passed must learn of an attribution that another rank has started, and join it in time.
"""
STREAM_BARRIER_MARGIN_SECONDS = 8.0
"""What a step barrier waits beyond its timeout on streams: the watchdogs' question and the attribution come first."""
EARLY_ATTRIBUTION_SECONDS, ATTRIBUTION_SECONDS = 1.5, 3.5
"""After a collective failed: how long live ranks have to report, before witnesses are asked where the others stand, and
from then on, before they count as missing: at once if none of them waits for other ranks."""
PADDLE_STORE_SECONDS = 60
"""For a member of a process group to reach Paddle's own store, which is open before it tries."""
QUICK_STEP_SECONDS = 1.0
"""Steps must be quicker than this to go without a barrier: in between, Gloo's own timeout of 30 s applies."""
EARLY_BARRIER_SECONDS = 5.0
"""Ranks whose slowest step is shorter than this reach the barrier at the start of a step."""
GLANCE_SECONDS = 0.25
"""For the largest timed allreduces of a quick look at a link, which delays the start of a training."""

# The flight recorder and its witness.
RECORDER_POLL_SECONDS = 0.25
"""Of the recorder's thread: how long a question for stacks may wait, and how old a heartbeat is at most."""
STACKS_ANSWER_SECONDS = 1.0
"""How long that thread has to get Python's lock and to write: then a signal makes it write without."""
STACKS_SIGNAL_SECONDS, STACKS_QUIET_SECONDS = 2.0, 0.2
"""For the handler of that signal, which takes milliseconds where the machine is not busy; and how long after its last
word it counts as done."""
STACKS_LOCK_SECONDS = 2.0
"""For another process that asks the same rank meanwhile."""
STACKS_POLL_SECONDS = 0.02
STACKS_ASK_SECONDS, STACKS_ASK_AGAIN_SECONDS = 4.0, 0.1
"""How long a rank that misses others waits to learn where they stand, and how often it looks: a witness asks the store
twice a second, and a rank has its time to answer."""
STACKS_RECENT_SECONDS = 15.0
"""How long a rank's report and the launchers' patience take after a question."""
WITNESS_FIRST_SECONDS, WITNESS_LAST_SECONDS = 0.5, 10.0
"""Between two searches for ranks that have not begun to record, at first and at most."""
STACKS_NATIVE_SECONDS = 10.0
"""For py-spy, which reads the symbols of all libraries."""
TOP_REFRESH_SECONDS = 1.0
TOP_LONG_SECONDS = 2.0
"""From when ``top`` says what a rank is in, and that others wait for it: steps are shorter, or it is worth a look."""
TOP_SILENT_SECONDS = 3.0
"""Without a heartbeat, which comes four times a second: on a busy machine it may be late."""
TOP_TURNS_SECONDS = 0.3
"""For seeing whether a silent rank runs, or only waits for a processor."""

# Data.
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

# Training, checkpoints and metrics.
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
"""For other nodes to write their checkpoints at the end of a training."""
COPIES_STOP_SECONDS = 20.0
"""The same at a graceful stop, below the launcher's grace period of 30 s."""
STRAGGLER_SECONDS = 5.0
"""The least time for which a rank must be slower than the others: less may be a checkpoint, or load for a moment."""
PROGRESS_LINE_SECONDS = 10.0
"""Between two progress lines within an epoch, in a log."""
SAME_STOP_SECONDS = 2.0
"""Stopping signals within this time are one request: Slurm and a launcher both pass theirs on to a rank."""
SAME_KEY_SECONDS = 0.2
"""Ctrl-C that comes twice within this time, from the terminal and from a program that passes it on, was typed once."""
VISUALDL_START_SECONDS = 30.0
"""For VisualDL's page to answer; importing it reads much from the disk."""
VISUALDL_ANSWER_SECONDS = 5.0
"""For one answer of it meanwhile."""
VISUALDL_POLL_SECONDS = 0.1
VISUALDL_STOP_SECONDS = 5.0
"""For its processes to end after SIGTERM."""
METRICS_ASK_AGAIN_SECONDS = 1.0
"""Between two questions to the job's store which ranks are gone: scrapes may come more often."""

# Launching and spawning.
REJOIN_SECONDS = 300.0
"""``--rejoin_timeout``: for a lost node, or the launcher of node 0, to come back: a machine starts in that time."""
LOST_NODE_SECONDS = 20.0
"""``--lost_node_timeout``: longer than a launcher on a busy machine is silent."""
GRACEFUL_STOP_SECONDS = 30.0
"""``--grace_seconds``: for ranks to save their state after SIGTERM; Kubernetes waits as long by default."""
WATCH_TICK_SECONDS = 0.05
"""How often a launcher looks at its ranks, and a selftest's supervisor at its subject."""
ASK_STORE_SECONDS = 0.5
"""How often they ask the job store for reports (seldomer in a job of many nodes), and for other supervisors."""
STORE_QUESTIONS_PER_SECOND = 250
"""How many of them all nodes together ask: a leader serves its ranks as well."""
LIST_CONNECTIONS_SECONDS = 10.0
"""How often connections to the job's endpoints are listed: one that ends is listed for another minute."""
ROOT_CAUSE_SECONDS = 2.0
"""How long a failure that may be secondary (another rank was lost) waits for its root cause."""
FAILED_RANK_EXIT_SECONDS = 5.0
"""A rank whose failure the store knows is about to exit: for its exit code and last lines. Exit handlers and threads
may take longer; then the launcher stops it."""
FOLLOWERS_SECONDS = 2.0
"""For ranks that lose another one to report it and to print their last line. A rank that they miss (frozen, in a loop)
does not exit by itself."""
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
SLOW_EXIT_SECONDS = 30.0
"""After a rank has ended with 0 until its launcher says where those stand that still run."""
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
SIGNPOST_SECONDS = 1.0
"""After this a launcher that waits looks for others with different flags, and again this often."""
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
"""For a command of the system: git, nvidia-smi, which all ranks of a machine may ask at the same time."""
SPAWN_EXIT_SECONDS = 20.0
"""A rank whose call has returned may wait for its threads, but not forever."""

# Doctor, selftest and recommend.
DOCTOR_JOIN_SECONDS, DOCTOR_MOST_JOIN_SECONDS = 20.0, 600.0
"""The default of ``--join_timeout``, and its maximum."""
DOCTOR_WHOLE_SECONDS = 56.0
"""From the start to the verdict, with the default ``--join_timeout``; the remaining time bounds each part."""
DOCTOR_PAIRS_SECONDS = 14.0
"""For the measurements of all pairs of nodes."""
DOCTOR_RESERVE_SECONDS = 14.0
"""Reserved for a pair that hangs, and for the exchange."""
DOCTOR_EXCHANGE_SECONDS, DOCTOR_LEAVE_SECONDS = 12.0, 4.0
"""For the others' reports to arrive; for all others to have read them."""
DOCTOR_GROUP_SECONDS, DOCTOR_GROUP_NEEDS_SECONDS = 25.0, 12.0
"""A group is abandoned after the first; with less than the second left it is not started."""
DOCTOR_PAUSE_SECONDS = 0.25
"""Between two looks at who has come."""
DOCTOR_FIRST_WORD_SECONDS, DOCTOR_NEXT_WORD_SECONDS = 3.0, 5.0
"""Until a message names the missing nodes, and between two of them."""
DOCTOR_ANSWER_SECONDS = 4.0
"""For another doctor's next message."""
DOCTOR_CONNECT_SECONDS = 2.5
"""A lost first packet is retransmitted after 1 s."""
DOCTOR_AFTER_FAILURE_SECONDS = 1.5
"""For a connection to another node after a failed job: shorter, because the launcher waits for it."""
DOCTOR_STALLED_SECONDS = 2.5
"""A connection that accepts no byte for this long has stalled."""
DOCTOR_ROUND_SECONDS = 6.0
"""How long a round of pairs waits for a node that is still busy with the last one."""
DOCTOR_STORE_SECONDS, DOCTOR_POLL_SECONDS = 8.0, 0.05
"""For an answer of node 0's store, whose machine may be busy; between two looks at what is in it."""
DOCTOR_PINGS_SECONDS = 0.4
"""For round trips of small messages to one node."""
DOCTOR_PACKET_SECONDS = 0.35
"""For the answers to one round of packets of all sizes."""
DOCTOR_SELECT_SECONDS = 0.2
"""How often the listener looks whether it is to end."""
DOCTOR_WRITING_SECONDS, DOCTOR_DISK_SECONDS = 3.0, 6.0
"""For writing into a folder; a disk that does not answer within the second hangs."""
DOCTOR_LEFT_BEHIND_SECONDS = 3600.0
"""A doctor ends within minutes: older files are from a killed one."""
DOCTOR_SPEED_SECONDS, DOCTOR_SPEED_PROCESS_SECONDS = 0.8, 8.0
"""For measuring a processor, and for the process that does it: numpy's import takes longer on a busy machine."""
DATA_DISK_SECONDS, DATA_LOADER_SECONDS = 3.0, 15.0
"""For reading files of a data folder past the page cache; for a loader, which may not become steady."""
DATA_WINDOW_SECONDS = 2.0
"""Speeds of a loader are compared over so long: batches come unevenly, and its workers start within a few seconds."""
DOCTOR_DATA_SECONDS = 40.0
"""For both, listing the folder, and the start of the workers."""
DOCTOR_IP_SECONDS, DOCTOR_NVIDIA_SMI_SECONDS = 2.0, 10.0
"""For an answer of ``ip`` and of ``nvidia-smi``, which hangs with its driver."""
SELFTEST_SECONDS, SELFTEST_SECONDS_PER_RANK = 900.0, 10.0
"""How long the checks that share a job may take. Nothing in them waits for longer than its own timeout; the simulation
takes longer with more ranks."""
SELFTEST_STEP_SECONDS = 300.0
"""For a step of the ladder: importing Paddle, joining, some tens of steps."""
SELFTEST_FAULT_COMES_SECONDS = 180.0
"""For the start of a job that fails on purpose: importing Paddle, joining, a few steps."""
SELFTEST_FAULT_GRACE_SECONDS = 10.0
"""In addition to the profile's collective_timeout_seconds: the time for detection, diagnosis and exit."""
SUBJECTS_FOLLOW_SECONDS = 5.0
"""For the other ranks of a job under test to end by themselves after one has failed."""
SELFTEST_KILLED_LATER_SECONDS = 5.0
"""Subjects that have not ended this long after the bound will not."""
SELFTEST_COLLECTIVE_SECONDS = 30.0
"""For one collective of a few kilobytes."""
SELFTEST_TRAINING_SECONDS = 60
"""collective_timeout_seconds of the trainings that are not to fail: a busy machine must not end them."""
SELFTEST_SIMULATION_SECONDS = 600.0
"""How long rank 0 may simulate all ranks; the others wait for it."""
SELFTEST_DELAY_SECONDS = 0.004
"""The longest random delay of a rank's step: several times what a small step takes."""
SELFTEST_COMPUTE_ON_SECONDS = 120.0
"""How long a rank that skips collectives computes alone: far beyond the bound for the others' end."""
RECOMMEND_START_SECONDS = 60.0
"""Time for importing Paddle, joining and a first step in addition to the steps of a trial, on a busy machine."""
RECOMMEND_MEASURE_SECONDS = 4.0
"""For measuring the links."""
RECOMMEND_COMPUTE_SECONDS, RECOMMEND_TRIAL_SECONDS = 4.0, 4.0
"""For the script's steps alone, and for those of a trial."""
PORT_PROGRESS_SECONDS = 5.0
"""Between two lines of `port` about how many scripts it has read."""
