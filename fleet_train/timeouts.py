"""Durations, each with its unit in its name and its reason beside it; so far those of ``cluster/``.

Use them as ``timeouts.NAME``, so that a test can shorten one.
"""

from __future__ import annotations

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
STORE_INNER_ROUND_SECONDS = 30.0
"""How long a relay tries to open a round within another one: its parent answers already."""
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
RELAY_RETRY_SECONDS = 0.1
"""Between two attempts of a relay to reach its parent."""
STORE_DIAL_SECONDS = 5.0
"""For accepting a connection: two round trips, and some lost packets."""
STORE_OUTLIVES_SECONDS = 300.0
"""How long the store's process stays for connected members after its parent has ended."""
STORE_QUIET_SECONDS = 0.5
"""Without members until it ends then: one that lost its connection may reconnect to report."""
STORE_POLL_SECONDS = 0.05
"""Between two looks at that."""
