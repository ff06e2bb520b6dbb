"""The device of a rank: by its launcher, its scheduler or its local rank."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import paddle
import pytest

from fleet_train.cluster import Cluster
from fleet_train.collectives import join
from fleet_train.collectives.join import choose_place, chosen_gpu
from fleet_train.errors import ClusterError


@pytest.mark.parametrize(
    ("selected", "local_rank", "visible", "gpu"),
    [
        (None, 0, 8, 0),
        (None, 5, 8, 5),
        (None, 3, 1, 0),  # a scheduler shows each rank a GPU of its own
        ("2", 0, 8, 2),
        ("0", 3, 8, 0),
        ("6,7", 1, 8, 6),
        (" 4 , 5", 0, 8, 4),
        ("", 2, 4, 2),
        (" ", 2, 4, 2),
        ("0", 3, 1, 0),
    ],
)
def test_launchers_choice_comes_before_what_is_visible_and_that_before_the_local_rank(
    selected: str | None, local_rank: int, visible: int, gpu: int
) -> None:
    environ = {} if selected is None else {"FLAGS_selected_gpus": selected}
    assert chosen_gpu(environ, local_rank, visible) == gpu


@pytest.mark.parametrize(
    ("selected", "local_rank", "visible", "told"),
    [
        (None, 2, 2, "local rank 2 asks for GPU 2, and this process sees 2 .*--nproc_per_node"),
        (None, 0, 0, "local rank 0 asks for GPU 0, and this process sees 0 .*PADDLE_DISTRI_BACKEND=gloo"),
        ("3", 0, 1, "FLAGS_selected_gpus=3 asks for GPU 3, and this process sees 1 .*CUDA_VISIBLE_DEVICES"),
        ("8,0", 0, 8, "FLAGS_selected_gpus=8 asks for GPU 8, and this process sees 8"),
        ("gpu:1", 0, 8, "FLAGS_selected_gpus='gpu:1': it takes GPU numbers, such as 0,1"),
        ("-1", 0, 8, "FLAGS_selected_gpus='-1': it takes GPU numbers"),
    ],
)
def test_gpu_that_is_not_there_is_refused_with_what_asks_for_it(
    selected: str | None, local_rank: int, visible: int, told: str
) -> None:
    environ = {} if selected is None else {"FLAGS_selected_gpus": selected}
    with pytest.raises(ClusterError, match=told):
        chosen_gpu(environ, local_rank, visible)


class Gpus:
    """A GPU build of Paddle, as far as `choose_place` sees one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, visible: int) -> None:
        self.current: list[str] = []
        device = SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: visible), set_device=self.current.append)
        fake: Any = SimpleNamespace(device=device, CUDAPlace=lambda gpu: ("gpu", gpu), CPUPlace=paddle.CPUPlace)
        monkeypatch.setattr(join, "paddle", fake)
        monkeypatch.setattr(join, "backend_name", lambda: "nccl")


def cluster(local_rank: int) -> Cluster:
    return Cluster(Cluster.imagined(1, 4).ranks, local_rank)


def test_chosen_gpu_is_paddles_current_one_and_its_flag_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """``init_parallel_env`` would take GPU 0 on every rank where the flag says nothing."""
    gpus = Gpus(monkeypatch, visible=4)
    monkeypatch.setenv("FLAGS_selected_gpus", "")
    assert choose_place(cluster(2)) == ("gpu", 2)
    assert (gpus.current, os.environ["FLAGS_selected_gpus"]) == (["gpu:2"], "2")
    monkeypatch.setenv("FLAGS_selected_gpus", "1,3")
    assert choose_place(cluster(2)) == ("gpu", 1)
    assert (gpus.current, os.environ["FLAGS_selected_gpus"]) == (["gpu:2", "gpu:1"], "1")


def test_refused_gpu_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch, visible=2)
    monkeypatch.setenv("FLAGS_selected_gpus", "7")
    with pytest.raises(ClusterError, match="asks for GPU 7"):
        choose_place(cluster(0))
    assert (gpus.current, os.environ["FLAGS_selected_gpus"]) == ([], "7")


def test_cpu_needs_no_choice_and_leaves_the_flag_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGS_selected_gpus", "nonsense")
    monkeypatch.setattr(join, "backend_name", lambda: "gloo")
    assert isinstance(choose_place(cluster(3)), paddle.CPUPlace)
    assert os.environ["FLAGS_selected_gpus"] == "nonsense"
