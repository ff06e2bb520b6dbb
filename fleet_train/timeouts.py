"""Every duration of this package, with its unit in its name and its reason beside it.

Use them as ``timeouts.NAME``, so that a test can shorten one. What a user can set (``--join_timeout``,
``collective_timeout_seconds``, ``--lost_node_timeout``, ...) has its default here too.
"""

from __future__ import annotations

# cluster and its store

# collectives

COLLECTIVE_TIMEOUT_SECONDS = 300.0
"""How long a collective may take while no other ends, unless the profile or the job says otherwise."""
COLLECTIVE_MARGIN_SECONDS = 60.0
"""Beyond a collective's timeout: Gloo's own timeout of 30 s and the search for missing ranks come first and report
more."""
THREAD_END_SECONDS = 1.0
"""For an engine's threads to end: one that is inside a call of a lost rank never does."""
WATCHDOG_POLL_SECONDS = 0.1
"""Between two looks of the watchdog at what is in flight."""
WATCHDOG_ASK_SECONDS = 2.0
"""After a collective has waited this long, ask the store, and then as often. Less than half of `ATTRIBUTION_SECONDS`: a
rank whose own timeout has not passed must learn of an attribution that another rank has started, and join it in time.
"""
STREAM_BARRIER_MARGIN_SECONDS = 8.0
"""What a step barrier waits beyond its timeout on streams: the watchdogs' question and the attribution come first."""
ATTRIBUTION_SECONDS = 5.0
"""After a collective failed: how long live ranks have to report, before the others count as missing."""
PADDLE_STORE_SECONDS = 60
"""For a member of a process group to reach Paddle's own store, which is open before it tries."""
QUICK_STEP_SECONDS = 1.0
"""Steps must be quicker than this to go without a barrier: in between, Gloo's own timeout of 30 s applies."""
EARLY_BARRIER_SECONDS = 5.0
"""Ranks whose slowest step is shorter than this reach the barrier at the start of a step."""
GLANCE_SECONDS = 0.25
"""For the largest timed allreduces of a quick look at a link, which delays the start of a training."""

# convert

# data

# train

# launch

# spawn and Ray

# doctor

# selftest

# recommend

# profile, plan and command line

# manifests
