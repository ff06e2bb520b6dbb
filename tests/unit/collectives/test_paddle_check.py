"""Which Paddle builds are refused with which message, and which backend is requested."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata, util

import paddle
import pytest

from fleet_train.collectives.paddle_compat import backend_name, installed_version, require_paddle
from fleet_train.errors import PaddleUnusable


@pytest.mark.parametrize("environ", [{}, {"FLAGS_enable_pir_api": "1"}, {"FLAGS_enable_pir_api": " True "}])
def test_the_installed_one_can_be_used(environ: dict[str, str]) -> None:
    require_paddle(environ)


def test_missing_paddle_is_an_error_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda _: None)
    with pytest.raises(PaddleUnusable, match=r"Paddle is not installed; .* pip install paddlepaddle=="):
        require_paddle({})


@pytest.mark.parametrize("value", ["0", "false", " FALSE ", "False"])
def test_old_ir_of_the_environment_is_refused(value: str) -> None:
    with pytest.raises(PaddleUnusable, match="unset FLAGS_enable_pir_api"):
        require_paddle({"FLAGS_enable_pir_api": value})


def test_old_ir_of_the_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paddle.framework, "use_pir_api", lambda: False)
    with pytest.raises(PaddleUnusable, match="Paddle runs its old IR"):
        require_paddle({})


def test_paddle_without_host_operators_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(paddle.static, "register_op")
    monkeypatch.setattr(paddle, "__version__", "3.2.0")
    with pytest.raises(PaddleUnusable, match=r"Paddle 3\.2\.0 has no paddle\.static\.register_op"):
        require_paddle({})


def packages(**versions: str) -> Callable[[str], str]:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    return version


@pytest.mark.parametrize("said", ["", None])
@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"paddlepaddle": "3.3.1"}, "3.3.1"),
        ({"paddlepaddle-gpu": "3.4.0"}, "3.4.0"),
        ({"paddlepaddle": "3.3.1", "paddlepaddle-gpu": "3.4.0"}, "3.3.1"),
        ({}, "unknown"),
    ],
)
def test_version_is_the_packages_where_paddle_does_not_say_it(
    monkeypatch: pytest.MonkeyPatch, said: str | None, versions: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr(metadata, "version", packages(**versions))
    assert installed_version() == paddle.__version__ != ""
    monkeypatch.setattr(paddle, "__version__", said)
    assert installed_version() == expected


@pytest.mark.parametrize(
    ("gpu", "asked", "expected"),
    [
        (True, None, "nccl"),
        (True, "nccl", "nccl"),
        (True, "GLOO", "gloo"),
        (False, None, "gloo"),
        (False, "nccl", "gloo"),
    ],
)
def test_backend_is_nccl_on_a_gpu_build_that_is_not_asked_for_gloo(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, asked: str | None, expected: str
) -> None:
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: gpu)
    assert backend_name({} if asked is None else {"PADDLE_DISTRI_BACKEND": asked}) == expected
