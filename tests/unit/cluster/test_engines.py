"""Which engine started this process: its variables, which of them are not trusted, and what it is advised."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fleet_train.cluster import at_import, network
from fleet_train.cluster.cluster import Cluster, from_endpoints
from fleet_train.cluster.engines import alone_despite, detect, resolve_hosts
from fleet_train.cluster.environment import cluster_from_environ
from fleet_train.cluster.slurm import allocated_nodes, expand_counts, expand_hostlist, port_of
from fleet_train.cluster.started import Started
from fleet_train.errors import ClusterError

SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_JOB_NODELIST": "n[1-8]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "2154561537",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
HOROVOD = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "40001",
}
VOLCANO = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0.job", "MASTER_PORT": "23456"}
PADDLE_JOB = {
    "PADDLE_JOB_ID": "digits",
    "PADDLE_NNODES": "2",
    "PADDLE_MASTER": "digits-worker-0:37777",
    "HOSTNAME": "digits-worker-1",
}
PADDLE_OPERATOR = {
    "PADDLE_TRAINERS": "10.0.0.1,10.0.0.2",
    "POD_IP": "10.0.0.2",
    "PADDLE_PORT": "2379",
    "TRAINER_PORTS_NUM": "20",
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_TRAINERS_NUM": "2",
}
ELASTIC = {"PADDLE_ELASTIC_JOB_ID": "ns-digits", "PADDLE_ELASTIC_NP": "3", "POD_IP": "digits-worker-2"}
TRAIN_JOB = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "digits-node-0-0.digits",
    "PET_MASTER_PORT": "29400",
}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "1", "FLEET_TRAIN_NNODES": "3", "FLEET_TRAIN_MASTER": "digits-0.digits:7000"}
WORKERS = ("digits-worker-0", "digits-worker-1", "digits-worker-2")
NODES = ("digits-node-0-0.digits", "digits-node-0-1.digits")
PODS = ("digits-0.digits", "digits-1.digits", "digits-2.digits")
BY_HAND = "whoever set RANK and WORLD_SIZE"
RECOGNISED: list[tuple[dict[str, str], tuple[Any, ...]]] = [
    (SLURM, ("Slurm (job 17, step 2)", 3, 4, 1, 2, 1, ("n1", "n2"), "n1", port_of(SLURM), "slurm-17.2")),
    (OPEN_MPI, ("Open MPI", 2, 4, 0, 2, None, (), "", 12160, "openmpi-2154561537")),
    (OPEN_MPI | {"PMIX_NAMESPACE": "n1@1/x y"}, ("Open MPI", 2, 4, 0, 2, None, (), "", 29824, "openmpi-n1@1-x-y")),
    (OPEN_MPI | {"PMIX_NAMESPACE": ""}, ("Open MPI", 2, 4, 0, 2, None, (), "", 24576, "openmpi-unnamed")),
    (HYDRA, ("MPICH (Hydra)", 1, 2, 1, 2, None, (), "", None, "hydra")),
    (HYDRA | {"I_MPI_MPIRUN": "mpirun"}, ("Intel MPI", 1, 2, 1, 2, None, (), "", None, "hydra")),
    (HOROVOD, ("horovodrun", 3, 4, 1, 2, None, (), "", None, "horovod-10.0.0.1-40001")),
    (TORCHRUN, ("torchrun", 3, 4, 1, 2, 1, (), "10.0.0.1", 29500, "torchrun-none")),
    (
        TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"},  # its own store keeps its port
        ("torchrun", 3, 4, 1, 2, 1, (), "10.0.0.1", 29501, "torchrun-none"),
    ),
    (VOLCANO, (BY_HAND, 1, 2, 0, None, None, (), "job-master-0.job", 23456, "torchrun-job-master-0.job")),
    (PADDLE_JOB, ("PaddleJob digits", 1, 2, 0, None, None, WORKERS[:2], WORKERS[0], 37777, "paddlejob-digits")),
    (
        PADDLE_JOB | {"PADDLE_MASTER": "10.1.2.3:37777"},
        ("PaddleJob digits", 1, 2, 0, None, None, WORKERS[:2], WORKERS[0], 37777, "paddlejob-digits"),
    ),
    (
        PADDLE_OPERATOR,
        ("paddle-operator", 1, 2, 0, None, None, ("10.0.0.1", "10.0.0.2"), "10.0.0.1", 2379, "paddle-operator"),
    ),
    (
        PADDLE_OPERATOR | {"PADDLE_JOB_ID": "digits"},
        ("paddle-operator", 1, 2, 0, None, None, ("10.0.0.1", "10.0.0.2"), "10.0.0.1", 2379, "digits"),
    ),
    (ELASTIC, ("paddle-operator (elastic)", 2, 3, 0, None, None, WORKERS, WORKERS[0], None, "ns-digits")),
    (TRAIN_JOB, ("TrainJob digits", 1, 2, 0, None, None, NODES, NODES[0], 29400, f"trainjob-{NODES[0]}")),
    (INDEXED_JOB, ("a Kubernetes Job", 1, 3, 0, None, None, PODS, PODS[0], 7000, f"job-{PODS[0]}")),
    (
        INDEXED_JOB | {"FLEET_TRAIN_MASTER": "10.0.0.1"},
        ("a Kubernetes Job", 1, 3, 0, None, None, (), "10.0.0.1", None, "job-10.0.0.1"),
    ),
]
"""(variables of one process, the beginning of what it is told: `Started`)."""


def recognised(environ: dict[str, str]) -> Started:
    found = detect(environ)
    assert found is not None
    return found


@pytest.mark.parametrize(("environ", "expected"), RECOGNISED)
def test_each_engine_is_recognised(environ: dict[str, str], expected: tuple[Any, ...]) -> None:
    run = "slurm-cluster-17" if environ is SLURM else ""
    assert detect(environ) == Started(*expected, run=run, processes=4 if environ is TRAIN_JOB else None)


@pytest.mark.parametrize(
    "environ",
    [
        {**SLURM, "SLURM_STEP_ID": "4294967291"},  # the batch script
        {**SLURM, "SLURM_STEP_ID": "4294967290"},  # salloc's interactive step
        {**SLURM, "SLURM_STEP_ID": ""},  # a shell inside an allocation
        {"JOB_COMPLETION_INDEX": "3"},
    ],
)
def test_what_is_no_task_of_several_is_a_job_of_its_own(environ: dict[str, str]) -> None:
    assert detect(environ) is None


def test_the_shell_of_srun_is_no_task_and_what_srun_starts_from_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = {**SLURM, "SLURM_PTY_PORT": "34567"}
    monkeypatch.setattr("os.isatty", lambda _: True)
    assert detect(inherited) is None
    monkeypatch.setattr("os.isatty", lambda _: False)
    assert detect(inherited) == detect(SLURM)


def test_one_task_in_a_larger_allocation_is_a_job_of_one_process() -> None:
    one = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    one |= {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    alone = recognised({**SLURM, **one})
    assert (alone.index, alone.count) == (0, 1)
    assert isinstance(cluster_from_environ({**SLURM, **one}), Cluster)
    shell = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2"}
    assert (detect(shell), allocated_nodes(shell), allocated_nodes(SLURM)) == (None, 2, 0)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ("node1",)),
        ("node[1-3]", ("node1", "node2", "node3")),
        ("node[08-11,20]", ("node08", "node09", "node10", "node11", "node20")),
        ("a1,b[2-3],c", ("a1", "b2", "b3", "c")),
        ("rack[1-2]node[0-1]-ib", ("rack1node0-ib", "rack1node1-ib", "rack2node0-ib", "rack2node1-ib")),
        ("127.0.0.[2-3]", ("127.0.0.2", "127.0.0.3")),
    ],
)
def test_slurms_lists_of_hosts(text: str, hosts: tuple[str, ...]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    "text", ["node[1-", "node]1[", "node[3-1]", "node[a-b]", "a,,b", "node[1-999999999]", "n[[1]]"]
)
def test_what_is_no_list_of_hosts_or_tasks(text: str) -> None:
    with pytest.raises(ClusterError, match="is not a list of hosts"):
        expand_hostlist(text)
    with pytest.raises(ClusterError, match="expands to 1000000 hosts"):
        expand_hostlist("a[0-999]b[0-999]")
    assert expand_counts("2(x3),1") == (2, 2, 2, 1)
    with pytest.raises(ClusterError, match="not a list of tasks per node"):
        expand_counts("2x3")


def test_jobs_and_steps_have_ports_of_their_own_below_the_kernels() -> None:
    ports = {
        port_of({**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}) for job in range(20) for step in (0, 1)
    }
    assert len(ports) == 40
    assert port_of({**SLURM, "SLURM_STEP_RESV_PORTS": "12005-12008"}) == 12005
    by_hand = {port_of({**SLURM, "SLURM_JOB_ID": job}) for job in ("x", "y", "9" * 5000, "\u00b2")}
    assert len(by_hand) == 4
    ports |= by_hand
    assert detect({**SLURM, "SLURM_STEP_ID": "\u00b2"}) is None
    mpis = {recognised({**OPEN_MPI, "PMIX_NAMESPACE": str(job)}).port or 0 for job in range(40)}
    assert len(mpis) > 30
    assert all(10_240 <= port < 32_768 - 64 and (port - 10_240) % 64 == 0 for port in ports | mpis)
    assert recognised({**OPEN_MPI, "PMIX_NAMESPACE": "x" * 100}).job == "openmpi-" + "x" * 60


@pytest.mark.parametrize("name", ["a..b", ".b", "a" * 64, "node." + "x" * 70 + ".net"])
def test_a_name_that_no_resolver_takes_is_refused_wherever_it_is_given(name: str) -> None:
    with pytest.raises(ClusterError, match="is no host name: between two dots there are 1 to 63 characters"):
        resolve_hosts(("127.0.0.1", name), by_slurm=True)
    with pytest.raises(ClusterError, match="is no host name"):
        network.resolve(name)
    with pytest.raises(ClusterError, match="is no host name"):
        from_endpoints(["127.0.0.1:6170", f"{name}:6170"])
    with pytest.raises(OSError, match="is no host name"):
        network.connect_from("127.0.0.1", name, 6170, 1.0)


def test_a_job_that_slurm_starts_again_keeps_its_name() -> None:
    again = recognised({**SLURM, "SLURM_RESTART_COUNT": "2", "SLURM_CLUSTER_NAME": "blue", "SLURM_STEP_ID": "5"})
    assert (again.restarts, again.run, again.job) == (2, "slurm-blue-17", "slurm-17.5")


def test_the_nearest_engine_counts() -> None:
    assert recognised(SLURM).in_words() == "started by Slurm (job 17, step 2): process 3 of 4"
    assert recognised({**SLURM, **OPEN_MPI}).engine == "Open MPI"
    assert recognised({**SLURM, "SLURM_PROCID": "0", **TORCHRUN}).engine == "torchrun"
    assert detect(SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4"}) == detect(SLURM)  # srun --mpi=pmi2
    assert detect(SLURM | {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "n1"}) == detect(SLURM)


SHELL = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("environ", "ranks", "words"),
    [
        ({"WORLD_SIZE": "2"}, 1, "this process trains alone, although WORLD_SIZE=2 says that there are more"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, 1, "although WORLD_SIZE=2"),  # without MASTER_ADDR
        ({"LOCAL_RANK": "1"}, 1, "although LOCAL_RANK=1"),
        ({"RANK": "1", "MASTER_ADDR": "n1"}, 1, "although RANK=1"),
        ({"WORLD_SIZE": " 2 "}, 1, "although WORLD_SIZE=2 says"),
        ({"WORLD_SIZE": "4"}, 2, "this job has 2 ranks, although WORLD_SIZE=4"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, 1, "although PMI_SIZE=2"),
        ({"MV2_COMM_WORLD_SIZE": "2"}, 1, "although MV2_COMM_WORLD_SIZE=2"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 1, "although OMPI_COMM_WORLD_SIZE=2"),
        ({"HOROVOD_SIZE": "2"}, 1, "although HOROVOD_SIZE=2"),
        ({"PALS_RANKID": "3"}, 1, "although PALS_RANKID=3"),
        ({**SHELL, "SLURM_PROCID": "1"}, 1, "although SLURM_PROCID=1"),
        (SHELL, 1, "Slurm allocated 2 nodes to the job"),
    ],
)
def test_a_job_alone_says_what_speaks_of_more_processes(environ: dict[str, str], ranks: int, words: str) -> None:
    assert detect(environ) is None
    said = alone_despite(environ, ranks)
    assert words in said
    launched = "If there are more, give --nproc_per_node=N, or the machines"
    alone = "start the script with fleet_train launch"
    assert ("srun before it" if environ is SHELL else launched) in said
    assert ("srun before it" if environ is SHELL else alone) in alone_despite(environ)
    assert "srun before it" in said or "FLEET_TRAIN_ENGINE=none" in said
    assert alone_despite({**environ, "FLEET_TRAIN_ENGINE": "none"}, ranks) == ""
    assert alone_despite({**environ, "FLEET_TRAIN_STORE": "10.0.0.1:6171"}, ranks) == ""


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        {"WORLD_SIZE": "", "LOCAL_RANK": "", "RANK": " "},
        {"RANK": "16"},  # somebody's own variable
        {"WORLD_SIZE": "auto", "RANK": "-1", "LOCAL_RANK": "-1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "1"},
        {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
    ],
)
def test_a_job_that_is_alone_on_purpose_says_nothing(environ: dict[str, str]) -> None:
    assert alone_despite(environ) == ""
    assert alone_despite({"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, 2) == ""  # of as many ranks as there are


def test_an_engine_can_be_named_or_left_out() -> None:
    assert detect(SLURM, "none") is None
    assert detect({**SLURM, "FLEET_TRAIN_ENGINE": "none"}) is None
    assert detect({**SLURM, **OPEN_MPI}, "slurm") == detect(SLURM)
    with pytest.raises(ClusterError, match=r"--engine mpi .* none of its variables is set"):
        detect(SLURM, "mpi")
    with pytest.raises(ClusterError, match="FLEET_TRAIN_ENGINE=lsf is not one of auto, none, mpi, horovod, slurm"):
        detect({"FLEET_TRAIN_ENGINE": "lsf"})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**PADDLE_JOB, "HOSTNAME": "worker7"}, "no rank; it is read from the pod's name, digits-worker-<number>"),
        ({**PADDLE_JOB, "HOSTNAME": "digits-worker-2"}, r"is not in 0 \.\. 1"),
        ({**ELASTIC, "POD_IP": "10.0.0.3"}, "keeps its nodes in etcd"),
        ({**TRAIN_JOB, "PET_NNODES": "1:4"}, "PET_NNODES=1:4, a variable of TrainJob"),
        ({**INDEXED_JOB, "FLEET_TRAIN_MASTER": "digits-0.digits:port"}, "FLEET_TRAIN_MASTER=.* is not of the form"),
        ({**VOLCANO, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "2"}, r"OMPI_COMM_WORLD_RANK=2 is not in 0 \.\. 1"),
        ({**SLURM, "SLURM_NODEID": "5"}, "SLURM_NODEID=5, but SLURM_STEP_NODELIST names 2 nodes"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2,1"}, "makes 3 tasks on 2 nodes, but SLURM_STEP_NUM_TASKS=4"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[1-"}, "is not a list of hosts"),
        ({**SLURM, "SLURM_LOCALID": "one"}, "SLURM_LOCALID=one, a variable of .*, is not a whole number"),
        ({**SLURM, "SLURM_HET_SIZE": "2"}, "heterogeneous"),
        ({**HOROVOD, "HOROVOD_ELASTIC": "1"}, "elastic job .* use a fixed -np, or fleet_train launch"),
        (
            {**SLURM, "RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "n1"},
            "RANK=0 of WORLD_SIZE=4, but Slurm .* process 3 of 4",
        ),
        *(
            ({**environ, name: " "}, name)  # blank counts as missing
            for environ, name in (
                (SLURM, "SLURM_LOCALID"),
                (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
                (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"),
                (PADDLE_JOB, "PADDLE_NNODES"),
                (ELASTIC, "PADDLE_ELASTIC_NP"),
                (INDEXED_JOB, "JOB_COMPLETION_INDEX"),
            )
        ),
    ],
)
def test_what_cannot_be_used_is_named_with_the_fix(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        detect(environ)


def test_a_rank_of_an_engine_gets_its_share_and_keeps_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_import, "usable_processors", lambda: 8)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(at_import, "is_amd_processor", lambda: True)
    monkeypatch.setattr(at_import, "_computes_on_cpu", lambda: True)
    environ = {**HYDRA, "FLAGS_new_executor_serial_run": "0"}
    at_import.advise_this_process(environ, loaded=())
    flags = {"FLAGS_new_executor_serial_run": "0", "FLAGS_new_executor_sequential_run": "1"}
    assert environ.pop("FLEET_TRAIN_ADVICE")
    assert environ == {**HYDRA, **flags, "OMP_NUM_THREADS": "4", "MKL_DEBUG_CPU_TYPE": "5"}
    serial = {"FLAGS_new_executor_serial_run": "1", "FLAGS_new_executor_sequential_run": "1"}
    assert at_import.advice_for_rank(0, computes_on_cpu=False, is_amd=True) == {"OMP_NUM_THREADS": "1", **serial}
    monkeypatch.setattr(at_import, "usable_processors", lambda: 3)  # bound to some, it uses all of them
    environ = dict(HYDRA)
    at_import.advise_this_process(environ, loaded=())
    assert environ["OMP_NUM_THREADS"] == "3"
    told, of_four = {"SLURM_CPUS_PER_TASK": "6"}, Started("an engine", 0, 8, local_count=4)
    assert at_import.threads_of_rank(told, of_four, 12, 12) == 6
    untold = Started("an engine", 0, 8)  # it does not say how many share the machine
    assert [at_import.threads_of_rank({}, started, 12, 12) for started in (of_four, untold)] == [3, 12]


@pytest.mark.parametrize(
    ("environ", "loaded"),
    [
        ({}, ()),
        (HYDRA, ("paddle",)),
        ({**SLURM, "SLURM_NODEID": "9"}, ()),  # a contradiction: fleet.init tells of it
        ({**INDEXED_JOB, "FLEET_TRAIN_STORE": "10.0.0.1:6171"}, ()),  # a rank of the launcher, which has done it
        ({**HYDRA, "PMI_RANK": "0", "PMI_SIZE": "1"}, ()),
    ],
)
def test_nothing_is_set_elsewhere(environ: dict[str, str], loaded: tuple[str, ...]) -> None:
    before = dict(environ)
    at_import.advise_this_process(environ, loaded)
    assert environ == before


def test_the_processors_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert at_import.usable_processors() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert at_import.usable_processors() == len(allowed)
    monkeypatch.delattr(os, "sched_getaffinity")  # as on other systems than Linux
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert at_import.usable_processors() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert at_import.usable_processors() == 1


def test_a_processor_of_amd_is_known_by_its_name(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    assert not at_import.is_amd_processor(info)
    info.write_text("vendor_id : GenuineIntel\n")
    assert not at_import.is_amd_processor(info)
    info.write_bytes(b"\xff vendor_id : AuthenticAMD\n")
    assert at_import.is_amd_processor(info)
