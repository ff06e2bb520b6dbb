"""Scripts for Paddle 1.6 to 2.x, rewritten for Paddle 3 and fleet_train: a table of names and one pass over a script.

``table.rows()`` returns all known names; ``port`` rewrites one script. Needs no Paddle, neither old nor new.
"""

from fleet_train.port.script import Ported, port

__all__ = ["Ported", "port"]
