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

# spawn and Ray

# doctor

DOCTOR_JOIN_SECONDS, DOCTOR_MOST_JOIN_SECONDS = 20.0, 600.0
"""The default of ``--join_timeout``, and its maximum."""
DOCTOR_WHOLE_SECONDS = 56.0
"""From the start to the verdict, with the default ``--join_timeout``; the remaining time bounds each part."""
DOCTOR_PAIRS_SECONDS = 14.0
"""For the measurements of all pairs of nodes."""
DOCTOR_RESERVE_SECONDS = 14.0
"""Reserved for a pair that hangs, and for the exchange."""
DOCTOR_EXCHANGE_SECONDS, DOCTOR_LEAVE_SECONDS = 12.0, 4.0
"""For the others' reports to arrive; for this node's values to reach all others."""
DOCTOR_GROUP_SECONDS, DOCTOR_GROUP_NEEDS_SECONDS = 25.0, 12.0
"""A group is abandoned after the first; with less than the second left it is not started."""
DOCTOR_PAUSE_SECONDS = 0.25
"""Between two exchanges of values with the other nodes."""
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
DOCTOR_TURN_SECONDS, DOCTOR_MOST_TRANSFER_SECONDS = 3.0, 5.0
"""How long a transfer waits for the running one; the longest that another node may ask for."""
DOCTOR_PINGS_SECONDS = 0.4
"""For round trips of small messages to one node."""
DOCTOR_PACKET_SECONDS = 0.35
"""For the answers to one round of packets of all sizes."""
DOCTOR_SELECT_SECONDS, DOCTOR_CLOSE_SECONDS = 0.2, 1.0
"""How often the responder looks whether it is to end; how long its end is waited for."""
DOCTOR_WRITING_SECONDS, DOCTOR_DISK_SECONDS = 3.0, 6.0
"""For writing into a folder; a disk that does not answer within the second hangs."""
DOCTOR_LEFT_BEHIND_SECONDS = 3600.0
"""A doctor ends within minutes: older files are from a killed one."""
DOCTOR_SPEED_SECONDS, DOCTOR_SPEED_PROCESS_SECONDS = 0.8, 8.0
"""For measuring a processor, and for the process that does it: numpy's import takes longer on a busy machine."""
DOCTOR_IP_SECONDS, DOCTOR_NVIDIA_SMI_SECONDS = 2.0, 10.0
"""For an answer of ``ip`` and of ``nvidia-smi``, which hangs with its driver."""

# selftest

SUBJECT_TICK_SECONDS, SUPERVISOR_LOOK_SECONDS = 0.05, 0.5
"""How often a supervisor looks at its subject, and at the other supervisors."""
SELFTEST_SECONDS, SELFTEST_SECONDS_PER_RANK = 900.0, 10.0
"""How long the checks that share a job may take. Nothing in them waits for longer than its own timeout; the simulation
takes longer with more ranks."""
SELFTEST_FAULT_COMES_SECONDS = 180.0
"""For the start of a job that fails on purpose: importing Paddle, joining, a few steps."""
SELFTEST_FAULT_GRACE_SECONDS = 10.0
"""In addition to the profile's collective_timeout_seconds: the time for detection, diagnosis and exit."""
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
SELFTEST_NVIDIA_SMI_SECONDS = 30.0
"""For an answer of ``nvidia-smi``, which all ranks of a machine ask at the same time."""

# recommend

RECOMMEND_START_SECONDS = 60.0
"""Time for importing Paddle, joining and a first step in addition to the steps of a trial, on a busy machine."""
RECOMMEND_MEASURE_SECONDS, RECOMMEND_CALIBRATE_SECONDS = 4.0, 10.0
"""For measuring the links; about how long the calibration takes."""
RECOMMEND_COMPUTE_SECONDS, RECOMMEND_TRIAL_SECONDS = 4.0, 4.0
"""For the script's steps alone, and for those of a trial."""
RECOMMEND_METHOD_SECONDS, RECOMMEND_ALONE_SECONDS = 0.8, 0.5
"""About how long each method is repeated concurrently with computing; at most for the steps alone before it."""
RECOMMEND_EXCHANGE_SECONDS = 0.25
"""The limit of one exchange on the link: of more gradients than that, the first ones represent all."""

# profile, plan and command line

# manifests
