"""Running the stock launcher without the rest of Paddle; with another build, or more use, Paddle is imported."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from fleet_train.launch import paddle_launch_main
from tests.support.processes import ROOT, clean_environ, python

_CPU = "cuda_version = 'False'\nxpu_xre_version = 'False'\nhip_version = None\n"
_PLAIN = "import os, sys\nprint('plain', os.getpid(), sys.argv[1:])\n"
_TALKS = "import os, sys\ndef launch(): print('quick', os.getpid(), sys.argv[1:])\n"


def an_installed_paddle(folder: Path, *, build: str = _CPU, launcher: str = _TALKS) -> None:
    """A package with the launcher's layout; ``_PLAIN`` runs where all of it is imported, as with ``python -m``."""
    files = {
        "__init__.py": "",
        "version/__init__.py": build,
        "utils/__init__.py": "",
        "utils/environments.py": "def strtobool(text): return text == 'true'\n",
        "distributed/__init__.py": "",
        "distributed/launch/__init__.py": "",
        "distributed/launch/__main__.py": _PLAIN,
        "distributed/launch/main.py": launcher,
    }
    for name, text in files.items():
        path = folder / "paddle" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def run(folder: Path, environ: dict[str, str] | None = None) -> tuple[int, list[str], str]:
    """Its process number, and what the process says."""
    command = python(paddle_launch_main.__file__, "-m", "paddle.distributed.launch", "--a=1", "train.py")
    with subprocess.Popen(
        command, cwd=folder, env=clean_environ(environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        said, errors = process.communicate(timeout=120)
    return process.pid, said.splitlines(), errors


def test_the_launchers_own_modules_run_in_this_process(tmp_path: Path) -> None:
    asks = "from paddle.utils import strtobool\nfrom paddle.base import core\nimport paddle, sys\n"
    launcher = asks + (
        "def launch(): print(sys.argv[1:], strtobool('true'), core.get_all_custom_device_type(),"
        " core.is_compiled_with_cuda(), paddle.is_compiled_with_rocm(), __file__)\n"
    )
    an_installed_paddle(tmp_path, launcher=launcher)
    (tmp_path / "paddle" / "__init__.py").write_text("raise RuntimeError('all of Paddle was imported')\n")
    _, said, errors = run(tmp_path)
    assert said == [f"['--a=1', 'train.py'] True [] False False {tmp_path}/paddle/distributed/launch/main.py"]
    assert errors == ""


@pytest.mark.parametrize(
    "build",
    [
        _CPU.replace("'False'", "'12.6'", 1),
        _CPU.replace("xpu_xre_version = 'False'", "xpu_xre_version = '5.0'"),
        _CPU.replace("None", "'6.1'"),
        "",
        "this is no Python",
    ],
)
def test_another_build_gets_the_plain_command(tmp_path: Path, build: str) -> None:
    an_installed_paddle(tmp_path, build=build)
    pid, said, _ = run(tmp_path)
    assert said == [f"plain {pid} ['--a=1', 'train.py']"]


def test_devices_of_plug_ins_get_the_plain_command(tmp_path: Path) -> None:
    an_installed_paddle(tmp_path)
    assert run(tmp_path)[1][0].startswith("quick")
    assert run(tmp_path, {"CUSTOM_DEVICE_ROOT": "/opt/npu"})[1][0].startswith("plain")
    (tmp_path / "paddle_custom_device").mkdir()
    assert run(tmp_path)[1][0].startswith("plain")


@pytest.mark.parametrize(
    "launcher",
    [
        "from paddle import something_new\n" + _TALKS,
        "from paddle.distributed import fleet\n" + _TALKS,
        "import paddle.not_there\n" + _TALKS,
        "raise RuntimeError('of another Paddle')\n",
        "import paddle\ndef launch(): paddle.device.cuda.device_count()\n",
        "import httpx\ndef launch(): httpx.get('http://10.0.0.1:6170')\n",
    ],
)
def test_one_question_more_gets_the_plain_command(tmp_path: Path, launcher: str) -> None:
    an_installed_paddle(tmp_path, launcher=launcher)
    pid, said, _ = run(tmp_path)
    assert said == [f"plain {pid} ['--a=1', 'train.py']"]


def test_what_has_started_a_process_is_not_started_again(tmp_path: Path) -> None:
    launcher = (
        "import paddle, subprocess\ndef launch():\n    rank = subprocess.Popen(['sleep', '60'])\n"
        "    try:\n        paddle.something_new\n    finally:\n        rank.kill()\n"
    )
    an_installed_paddle(tmp_path, launcher=launcher)
    _, said, errors = run(tmp_path)
    assert said == []
    assert "AttributeError: module 'paddle' has no attribute 'something_new'" in errors


def test_ranks_get_the_same_from_the_installed_launcher_in_either_way(tmp_path: Path) -> None:
    """Their arguments, their working directory and all of their environment."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import json, os, sys\n"
        "told = {'argv': sys.argv[1:], 'cwd': os.getcwd(), 'environ': dict(os.environ)}\n"
        "open(sys.argv[1] + os.environ['PADDLE_TRAINER_ID'], 'w').write(json.dumps(told))\n"
    )
    flags = ["--ips=127.0.0.2,127.0.0.3", "--host=127.0.0.3", "--start_port=6170", "--nproc_per_node=2"]
    flags += [f"--log_dir={tmp_path / 'log'}", "--job_id=a", "--enable_gpu_log=False"]
    # Importing Paddle sets the first to an empty text; the second is a random name.
    of_the_import = {"CUSTOM_DEVICE_ROOT": ""}
    told = {}
    for name, way in {"plain": [], "quick": [paddle_launch_main.__file__]}.items():
        out = str(tmp_path / name)
        command = python(*way, "-m", "paddle.distributed.launch", *flags, str(script), out)
        said = subprocess.run(command, cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, check=True)
        assert ("ccache" in said.stderr) == (name == "plain")  # of Paddle's import
        told[name] = [json.loads(Path(f"{out}{rank}").read_text()) for rank in (2, 3)]
    for plain, quick in zip(told["plain"], told["quick"], strict=True):
        assert plain["cwd"] == quick["cwd"]
        assert len(plain["environ"].pop("POD_NAME")) == len(quick["environ"].pop("POD_NAME"))
        assert plain["environ"] == quick["environ"] | of_the_import


def test_it_imports_nothing_of_ours_and_no_package() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import paddle_launch_main as it; "
        "print([name for name in sys.modules if name.split('.')[0] in ('fleet_train', 'paddle', 'numpy')])"
    )
    folder = str(ROOT / "fleet_train" / "launch" / "workers")
    environ = clean_environ({"PYTHONPATH": ""})
    said = subprocess.run(python("-c", code, folder), env=environ, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
