"""The reference trainer as a script, for launchers that need a path: the same flags as `fleet_train train`.

python -m paddle.distributed.launch --ips=A,B --host=A --nproc_per_node=2 tools/train.py --model cnn --data digits
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from fleet_train.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    main()
