"""Numbers that flags, variables and help texts share. Imports nothing: every `--help` reads them."""

from __future__ import annotations

DEFAULT_STARTED_PORT = 6170
DEFAULT_JOIN_TIMEOUT_SECONDS = 300.0
MOST_SECONDS = 1_000_000.0
"""The longest time that any option accepts: 11 days; sockets accept no timeout of more than 24."""
