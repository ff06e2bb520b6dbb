"""For launchers that take a script and no module, as ``python -m paddle.distributed.launch`` does."""

from __future__ import annotations

import sys
from pathlib import Path

# A script's own folder is Python's first place to look in; the package is beside it where it is not installed.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from fleet_train.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.argv.insert(1, "selftest")
    main()
