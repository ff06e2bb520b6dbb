"""``python -m fleet_train <command>``; or this file and the command, for launchers that take only a script, not a
module."""

import sys
from pathlib import Path

if not __package__:
    # A script's own folder comes first in Python's path: here that would be the inside of the package.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from fleet_train.cli import main

if __name__ == "__main__":
    main()
