"""Machines with unlike numbers of processes: 1 + 2 + 1 ranks on 127.0.0.2, .3 and .4, one launcher each."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest

from tests.integration.launch.conftest import Bench, send
from tests.support.ports import free_ports
from tests.support.processes import (
    RESULTS_VARIABLE,
    Started,
    clean_environ,
    output_of,
    python,
    run_alone,
    write_script,
)
from tests.support.ranks import read_results

_HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
_LIST = f"--cluster_node_ips={_HOSTS[0]},{_HOSTS[1]}:2,{_HOSTS[2]}"

# A rank trains each program with its quarter of the joint batch; without a launcher one process has all of it.
_TRAIN = """
import numpy as np
import paddle

from fleet_train import fleet
from fleet_train.errors import ProfileError
from fleet_train.profile import Profile
from tests.support.worker import report

paddle.enable_static()
fleet.init(is_collective=True)
GROUPED = {"use_hierarchical_allreduce": True}
CASES = {
    "plain": {},
    "local sgd": {"use_local_sgd": True, "local_sgd_is_warm_steps": 1, "local_sgd_steps": 2},
    "groups of two": {**GROUPED, "hierarchical_allreduce_inter_nranks": 2},
    "groups of nodes": GROUPED,
}

def train(settings):
    main, startup = paddle.static.Program(), paddle.static.Program()
    with (
        paddle.static.program_guard(main, startup),
        paddle.static.scope_guard(paddle.static.Scope()),
        paddle.utils.unique_name.guard(),
    ):
        paddle.seed(7)
        x, y = paddle.static.data("x", [None, 8], "float32"), paddle.static.data("y", [None, 1], "float32")
        hidden = paddle.static.nn.fc(x, 16, activation="tanh")
        loss = (paddle.static.nn.fc(hidden, 1) - y).square().mean()
        fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), Profile(**settings)).minimize(loss)
        exe = paddle.static.Executor(fleet.place())
        exe.run(startup)
        random = np.random.default_rng(1)
        ranks, rank = fleet.worker_num(), fleet.worker_index()
        for _ in range(5):
            samples = random.standard_normal((4, 4, 8), dtype="float32")
            own = samples.reshape(ranks, -1, 8)[rank]
            exe.run(main, feed={"x": own, "y": own.sum(1, keepdims=True)}, fetch_list=[loss])
        state = main.state_dict("param", paddle.static.global_scope())
        return np.concatenate([np.asarray(value).ravel() for value in state.values()])

for name, settings in CASES.items():
    try:
        report(**{name: train(settings)})
    except ProfileError as refusal:
        report(**{name: str(refusal)})
report(nodes=fleet.node_num(), ranks=fleet.worker_num())
"""


def start(bench: Bench, script: str, *flags: str) -> list[Started]:
    """One launcher for each machine."""
    path, port = write_script(script, bench.folder), free_ports(3, _HOSTS)
    environ = clean_environ({RESULTS_VARIABLE: str(bench.folder)})
    return [
        bench.job.start(
            f"node{index}",
            python("-m", "fleet_train", "launch", *flags, f"--node_ip={host}", f"--started_port={port}", str(path)),
            environ,
            bench.folder / f"node{index}",
        )
        for index, host in enumerate(_HOSTS)
    ]


def test_they_train_as_one_process_and_as_one_machine_would(
    bench: Bench, tmp_path_factory: pytest.TempPathFactory
) -> None:
    start(bench, _TRAIN, _LIST, "--direct_ranks=1")  # each machine has a relay
    assert [one.exit_code for one in bench.ended(120.0)] == [0, 0, 0], bench.job.report()
    alone, together = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("together")
    script = str(write_script(_TRAIN, alone))
    one_machine = python("-m", "fleet_train", "launch", "--nproc_per_node=4", f"--started_port={free_ports(5)}", script)
    for folder, command in ((alone, python(script)), (together, one_machine)):
        ended = run_alone(folder, command, {RESULTS_VARIABLE: str(folder)}, cwd=folder)
        assert ended.exit_code == 0, ended.output
    ranks, single, same = read_results(bench.folder), read_results(alone)[0], read_results(together)
    assert [(each["nodes"], each["ranks"]) for each in ranks.values()] == [(3, 4)] * 4
    for rank, each in ranks.items():
        np.testing.assert_allclose(each["plain"], single["plain"], rtol=0, atol=1e-6)
        for name in ("plain", "local sgd", "groups of two"):
            np.testing.assert_array_equal(each[name], same[rank][name])
        assert "the nodes have [1, 2] ranks" in each["groups of nodes"]
    np.testing.assert_allclose(ranks[2]["groups of two"], single["plain"], rtol=0, atol=1e-6)
    assert np.abs(ranks[0]["local sgd"] - single["plain"]).max() > 1e-5


_ATTEMPTS = """
import os, signal, time
names = "TRAINER_ID TRAINERS_NUM LOCAL_RANK LOCAL_SIZE NNODES".split()
attempt = int(os.environ["FLEET_TRAIN_ATTEMPT"])
print("attempt", attempt, *(os.environ[f"PADDLE_{name}"] for name in names), flush=True)
time.sleep(0 if attempt == 2 else 120)
"""


def test_they_restart_after_a_rank_and_go_on_without_a_machine(bench: Bench) -> None:
    flags = "--max_restarts=2 --min_nodes=2 --rejoin_timeout=2 --lost_node_timeout=5".split()
    launchers = start(bench, _ATTEMPTS, _LIST, *flags)
    logs = ["node0/log/workerlog.0", "node1/log/workerlog.0", "node1/log/workerlog.1", "node2/log/workerlog.0"]
    bench.wait_for_output("attempt 0", *logs)
    os.kill(json.loads(bench.log("node1/log/workerend.1.json"))["pid"], signal.SIGKILL)
    bench.wait_for_output("attempt 1", *logs)
    assert [bench.log(each) for each in logs] == [
        "attempt 1 0 4 0 1 3\n",
        "attempt 1 1 4 0 2 3\n",
        "attempt 1 2 4 1 2 3\n",
        "attempt 1 3 4 0 1 3\n",
    ]
    assert "rank 2 (127.0.0.3:" in launchers[0].output
    send(launchers[0], signal.SIGKILL)  # also the one that leads
    assert [one.exit_code for one in bench.ended(60.0)][1:] == [0, 0], bench.job.report()
    assert [bench.log(each) for each in logs[1:]] == [
        "attempt 2 0 3 0 2 2\n",
        "attempt 2 1 3 1 2 2\n",
        "attempt 2 2 3 0 1 2\n",
    ]


_WAIT = """
import time
import paddle
from fleet_train import fleet
paddle.enable_static()
fleet.init(is_collective=True)
print("joined", flush=True)
time.sleep(60)
"""


def test_where_they_stand_is_told_by_any_machine_of_the_list(bench: Bench) -> None:
    launchers = start(bench, _WAIT, _LIST)
    bench.wait_for_output("joined", "node0/log/workerlog.0", "node1/log/workerlog.1", "node2/log/workerlog.0")
    store = json.loads(bench.log("node0/log/job.json"))["store"]  # on the first machine, behind its one rank
    port = int(store.partition("/")[0].rpartition(":")[2]) - 1
    for node in ("127.0.0.2:1", "127.0.0.3:2"):
        asked = output_of(python("-m", "fleet_train", "stacks", f"--ips={node}", f"--started_port={port}", "--json"))
        assert [each["rank"] for each in json.loads(asked)[0][0]] == [0, 1, 2, 3]
    send(launchers[0], signal.SIGTERM)
    bench.ended()


def test_flags_that_give_unlike_numbers_are_refused_with_how_to_write_them(bench: Bench) -> None:
    path, port = write_script(_ATTEMPTS, bench.folder), free_ports(4, _HOSTS)
    for index, host in enumerate(_HOSTS[:2]):
        where = [f"--cluster_node_ips={','.join(_HOSTS[:2])}", f"--node_ip={host}", f"--started_port={port}"]
        command = python("-m", "fleet_train", "launch", *where, f"--nproc_per_node={index + 1}", str(path))
        bench.job.start(f"node{index}", command, clean_environ(), bench.folder / f"node{index}")
    ended = bench.ended(60.0)
    assert [one.exit_code for one in ended] == [8, 8], bench.job.report()
    for one in ended:
        assert (
            "write each node's number into the list, the same on every node: --cluster_node_ips=A:2,B:1" in one.output
        )
