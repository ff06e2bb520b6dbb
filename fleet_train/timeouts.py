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

# selftest

# recommend

# profile, plan and command line

# manifests
