"""Run as ranks: the script that the first argument names, in jobs whose collectives are enqueued and end late."""

from __future__ import annotations

import os
import runpy
import sys

from tests.support.late import install_late_engine, install_tripwire

if __name__ == "__main__":
    install_tripwire()
    install_late_engine(seed=int(os.environ.get("PADDLE_TRAINER_ID", "0")))  # no two ranks are late alike
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
