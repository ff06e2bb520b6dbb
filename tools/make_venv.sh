#!/usr/bin/env bash
# make_venv.sh <python> <venv folder> <requirements file>: what stands between a fresh machine and `make demo`.
# Says in one line what the machine lacks and how to get it.
set -euo pipefail
python=$1 venv=$2 requirements=$3

stop() {
    echo "make: $1" >&2
    exit 1
}

command -v "$python" >/dev/null || stop "there is no '$python'; on Debian and Ubuntu: apt-get install python3 python3-venv"
version=$("$python" --version 2>&1) || stop "'$python --version' fails: $version"
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
    stop "needs Python 3.10 to 3.13, '$python' is $version; name another one: make PYTHON=python3.12 ..."
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    stop "'$python' has no venv module; on Debian and Ubuntu: apt-get install python3-venv"
! grep -qE '^(paddlepaddle|-r requirements\.txt)' "$requirements" ||
    "$python" -c 'import ctypes; ctypes.CDLL("libgomp.so.1")' 2>/dev/null ||
    stop "Paddle needs libgomp.so.1, which is not here; on Debian and Ubuntu: apt-get install libgomp1"

# Made anew only for another interpreter: pip changes what differs in an existing environment.
if [[ $("$venv/bin/python" --version 2>/dev/null || true) != "$version" ]]; then
    "$python" -m venv --clear "$venv"
fi
echo "installing $requirements into $venv (a few hundred MB the first time)"
rm -f "$venv"/.installed-*
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements"
# `fleet_train` is this checkout's, in the environment's commands and imports, whichever folder one is in.
"$venv/bin/python" - <<'PYTHON'
import sys, sysconfig
from pathlib import Path

Path(sysconfig.get_path("purelib"), "fleet_train_checkout.pth").write_text(f"{Path.cwd()}\n")
script = Path(sysconfig.get_path("scripts"), "fleet_train")
script.write_text(f"#!{sys.executable}\nimport sys\n\nfrom fleet_train.cli import main\n\nsys.exit(main())\n")
script.chmod(0o755)
PYTHON
