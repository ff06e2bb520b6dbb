"""Where this process is in its job, by the variables of its launcher; what importing fleet_train corrects in them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from fleet_train.cluster import at_import
from fleet_train.cluster.at_import import correct, read_before_import, warning_of
from fleet_train.cluster.cluster import Cluster, Rank, assign, from_endpoints
from fleet_train.cluster.environment import (
    SETTINGS,
    ask_here,
    asked_settings,
    asked_strategy,
    attempt,
    cluster_from_environ,
    is_strict,
    join_timeout_seconds,
    rank_variables,
)
from fleet_train.cluster.kubernetes import CloudNode, read_paddlecloud
from fleet_train.errors import ClusterError

OLD_COMMAND = (
    "python -u -m paddle.distributed.launch --cluster_node_ips=10.0.0.1,10.0.0.2 --node_ip=10.0.0.2 "
    "--started_port=6170 --selected_gpus=0 --log_dir mylog train.py --lr 0.1"
).split()
TWO_GPUS = [word.replace("=0", "=0,1") if "gpus" in word else word for word in OLD_COMMAND]
UNLIKE = [word.replace("10.0.0.1,10.0.0.2", "10.0.0.1,10.0.0.2:2") for word in OLD_COMMAND]
PADDLECLOUD = "python -m paddle.distributed.launch --use_paddlecloud train.py".split()
# What the stock launcher's compatible mode tells each of its processes: a job of this machine alone.
LONELY = {
    "PADDLE_TRAINER_ID": "0",
    "PADDLE_RANK_IN_NODE": "0",
    "PADDLE_TRAINERS_NUM": "1",
    "PADDLE_CURRENT_ENDPOINT": "127.0.0.1:33403",
    "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:33403",
}
LEGACY = {
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_RANK_IN_NODE": "1",
    "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:6170,127.0.0.1:6171",
    "PADDLE_CURRENT_ENDPOINT": "127.0.0.1:6171",
}
MODERN = {
    "PADDLE_TRAINER_ID": "2",
    "PADDLE_TRAINERS_NUM": "4",
    "PADDLE_NNODES": "2",
    "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:6070",
    "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6070,10.0.0.1:6071,10.0.0.2:6070,10.0.0.2:6071",
}


def test_the_cluster_is_that_of_the_variables_or_of_the_launchers_arguments() -> None:
    assert cluster_from_environ({}).world_size == Cluster.single().world_size == Cluster.single().node_num == 1
    cluster = cluster_from_environ(LONELY, OLD_COMMAND)
    assert cluster.endpoints == ["10.0.0.1:6170", "10.0.0.2:6170"]
    assert (cluster.rank, cluster.node_num, cluster.local_rank) == (1, 2, 0)
    assert cluster_from_environ(rank_variables(cluster)).endpoints == cluster.endpoints
    cluster = cluster_from_environ(LEGACY, TWO_GPUS)
    assert (cluster.rank, cluster.world_size, cluster.this.endpoint) == (3, 4, "10.0.0.2:6171")
    cluster = cluster_from_environ(LEGACY, UNLIKE)
    assert cluster.endpoints == ["10.0.0.1:6170", "10.0.0.2:6170", "10.0.0.2:6171"]
    assert (cluster.rank, cluster.node_num, cluster.local_rank) == (2, 2, 1)
    cluster = cluster_from_environ(MODERN)
    assert (cluster.rank, cluster.world_size, cluster.node_num, cluster.local_rank) == (2, 4, 2, 0)
    assert cluster_from_environ({"PADDLE_TRAINER_ID": "0"}).world_size == 1
    command = "python -m paddle.distributed.launch --nproc_per_node 1 train.py --cluster_node_ips=a,b".split()
    assert cluster_from_environ(LONELY, command).world_size == 1, "flags of the script are not the launcher's"


@pytest.mark.parametrize(
    ("environ", "command", "message"),
    [
        (LONELY, [*OLD_COMMAND[:5], "--node_ip=10.0.0.9"], r"--node_ip=10\.0\.0\.9 is not one of --cluster"),
        (LONELY, [*PADDLECLOUD[:3], "--nproc_per_nodes=2"], "'--nproc_per_nodes'; did you mean '--nproc_per_node'"),
        ({}, [*OLD_COMMAND[:4], "--cluster_node_ips=10.0.0.1,10.0.0.1"], r"10\.0\.0\.1 is listed more than once"),
        (
            LONELY,
            UNLIKE,
            r"(?s)asked for 2 .* started 1.*=10\.0\.0\.1,10\.0\.0\.2:2 --node_ip=10\.0\.0\.2 --started_port=6170 train",
        ),
        (
            LONELY,
            TWO_GPUS,
            r"(?s)asked for 2 processes on this machine and started 1.*fleet_train launch --cluster_node_ips="
            r"10.0.0.1,10.0.0.2 --node_ip=10.0.0.2 --started_port=6170 --nproc_per_node=2 train.py --lr 0.1$",
        ),
        (MODERN | {"PADDLE_TRAINERS_NUM": "3"}, (), "PADDLE_TRAINERS_NUM=3, but PADDLE_TRAINER_ENDPOINTS lists 4"),
        (MODERN | {"PADDLE_TRAINER_ID": "0"}, (), "PADDLE_CURRENT_ENDPOINT=10"),
        ({"PADDLE_TRAINERS_NUM": "2"}, (), "PADDLE_TRAINER_ENDPOINTS, which says where they are, is not set"),
        ({"PADDLE_TRAINER_ID": "1"}, (), "PADDLE_TRAINER_ID=1 makes this process one of several, but .* are not set"),
        ({"PADDLE_TRAINER_ID": "x"}, (), "PADDLE_TRAINER_ID='x' is not a whole number"),
        ({"PADDLE_TRAINER_ENDPOINTS": "a:1,a:1"}, (), "endpoint a:1 is given for two ranks"),
        *(
            ({"PADDLE_TRAINER_ENDPOINTS": f"10.0.0.1{port}"}, (), "is not of the form host:port")
            for port in ("", ":", ":\u00b2", ":" + "9" * 5000)
        ),
        (
            {"PADDLE_TRAINERS": "10.0.0.1", "POD_IP": "10.0.0.1", "TRAINER_PORTS_NUM": "1", "PADDLE_TRAINERS_NUM": "2"},
            PADDLECLOUD,
            "TRAINER_PORTS_NUM=1 is too few for 2 processes",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(environ: dict[str, str], command: Sequence[str], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        cluster_from_environ(environ, command)


def test_paddlecloud_pod() -> None:
    pod = {"PADDLE_TRAINERS": "10.0.0.1,10.0.0.2", "POD_IP": "10.0.0.2", "PADDLE_PORT": "7000"}
    # The stock launcher's own variables describe its lonely job: rank 0, whichever pod this is.
    cluster = cluster_from_environ({**LONELY, **pod}, PADDLECLOUD)
    assert (cluster.rank, cluster.endpoints) == (1, ["10.0.0.1:7000", "10.0.0.2:7000"])


def test_a_join_timeout_is_a_finite_number_of_seconds_and_strictness_on_or_off() -> None:
    assert join_timeout_seconds({}) == 300.0
    assert join_timeout_seconds({"FLEET_TRAIN_JOIN_TIMEOUT": "2.5"}) == 2.5
    for text in ("nan", "inf", "-1", "0", "1e400", "1e7", "soon"):
        with pytest.raises(ClusterError, match=r"is not a positive number of seconds up to 1e\+06"):
            join_timeout_seconds({"FLEET_TRAIN_JOIN_TIMEOUT": text})
    assert not is_strict({})
    assert [is_strict({"FLEET_TRAIN_STRICT": text}) for text in "01"] == [False, True]
    with pytest.raises(ClusterError, match="FLEET_TRAIN_STRICT='yes' is not 1"):
        is_strict({"FLEET_TRAIN_STRICT": "yes"})


def test_the_attempt_is_counted_from_zero_by_the_launcher() -> None:
    assert (attempt({}), attempt({"FLEET_TRAIN_ATTEMPT": "3"})) == (0, 3)
    for wrong in ("-1", "two"):
        with pytest.raises(ClusterError, match="FLEET_TRAIN_ATTEMPT"):
            attempt({"FLEET_TRAIN_ATTEMPT": wrong})


@pytest.mark.parametrize("text", ["\u00b2", "\uff16", "9" * 5000, "-1", "x"])
@pytest.mark.parametrize("flag", ["started_port", "nproc_per_node"])
def test_the_stock_launchers_numbers_are_read_strictly(flag: str, text: str) -> None:
    command = ["python", "-m", "paddle.distributed.launch", "--cluster_node_ips=10.0.0.1", f"--{flag}={text}", "t.py"]
    with pytest.raises(ClusterError, match="is not a whole number"):
        cluster_from_environ({}, command)


def test_settings_of_the_launcher_are_a_list_of_texts() -> None:
    assert asked_settings({}) == asked_settings({SETTINGS: ""}) == ()
    assert asked_settings({SETTINGS: '["a=1", "b=x y"]'}) == ("a=1", "b=x y")
    for text in ("a=1", "{}", "[1]", '"a"'):
        with pytest.raises(ClusterError, match="FLEET_TRAIN_SET is not a JSON list of texts"):
            asked_settings({SETTINGS: text})


def test_flags_of_a_program_win_over_the_launchers_and_rank_0_says_so() -> None:
    environ = {"FLEET_TRAIN_STRATEGY": "local_sgd", SETTINGS: '["a=1", "b=2"]'}
    assert ask_here(environ, "unfused", ("b=3",)) == (
        "the launcher's --strategy local_sgd and --set b is not used: the program has its own"
    )
    assert (asked_strategy(environ), asked_settings(environ)) == ("unfused", ("a=1", "b=3"))
    assert ask_here({"FLEET_TRAIN_STRATEGY": "a", "PADDLE_TRAINER_ID": "1"}, "b", ()) == ""
    assert ask_here(environ, "unfused", ("b=3",)) == ask_here(environ, None, ()) == ""
    assert (asked_strategy(environ), asked_settings(environ)) == ("unfused", ("a=1", "b=3"))


def test_ranks_are_counted_through_the_hosts_and_endpoints_on_one_form_a_node() -> None:
    assert assign(["a", "b"], [1, 2], 6170) == (
        Rank(0, "a", 6170, 0, 0),
        Rank(1, "b", 6170, 1, 0),
        Rank(2, "b", 6171, 1, 1),
    )
    assert assign(["a", "b"], 2, 6170) == (
        Rank(0, "a", 6170, 0, 0),
        Rank(1, "a", 6171, 0, 1),
        Rank(2, "b", 6170, 1, 0),
        Rank(3, "b", 6171, 1, 1),
    )
    ranks = from_endpoints(["a:1", "a:2", "b:1"])
    assert [(rank.node_index, rank.local_index) for rank in ranks] == [(0, 0), (0, 1), (1, 0)]
    ranks = from_endpoints(["a:1", "a:2", "a:3", "a:4"], node_num=2)  # two launchers on one host
    assert [(rank.node_index, rank.local_index) for rank in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_cluster_answers_where_this_process_is() -> None:
    cluster = Cluster(assign(["10.0.0.1", "10.0.0.2"], 2, 6170), rank=3)
    assert (cluster.world_size, cluster.node_num, cluster.local_rank) == (4, 2, 1)
    assert cluster.ranks_on_node(1) == [2, 3]
    assert cluster.endpoints == ["10.0.0.1:6170", "10.0.0.1:6171", "10.0.0.2:6170", "10.0.0.2:6171"]
    described = [cluster.describe(rank) for rank in (-1, 0, 3, 4)]
    assert described == ["rank -1", "rank 0 (10.0.0.1:6170)", "rank 3 (10.0.0.2:6171)", "rank 4"]


@pytest.mark.parametrize("command", [TWO_GPUS, ["python", "/usr/bin/fleetrun", *TWO_GPUS[4:]]])
def test_old_command_on_the_second_node_makes_local_process_1_rank_3_of_4(command: list[str]) -> None:
    environ = dict(LEGACY)
    before = correct(environ, command)
    assert environ["PADDLE_TRAINER_ID"] == "3"
    assert environ["PADDLE_TRAINERS_NUM"] == "4"
    assert environ["PADDLE_TRAINER_ENDPOINTS"] == "10.0.0.1:6170,10.0.0.1:6171,10.0.0.2:6170,10.0.0.2:6171"
    assert environ["PADDLE_CURRENT_ENDPOINT"] == "10.0.0.2:6171"
    assert environ["PADDLE_RANK_IN_NODE"] == "1"
    assert before == {name: value for name, value in LEGACY.items() if name != "PADDLE_RANK_IN_NODE"}


@pytest.mark.parametrize(
    ("environ", "command"),
    [
        (LEGACY, ["bash", "run.sh"]),
        (LEGACY, "python -m paddle.distributed.launch --nproc_per_node=2 train.py".split()),
        (LEGACY, "python -m paddle.distributed.launch --ips=10.0.0.1,10.0.0.2 --host=10.0.0.2 train.py".split()),
        (LEGACY | {"FLEET_TRAIN_STORE": "10.0.0.1:6172"}, TWO_GPUS),
        ({}, TWO_GPUS),
        # Three processes were asked for and two were started: fleet.init says what to do.
        (LEGACY, [word.replace("=0,1", "=0,1,2") for word in TWO_GPUS]),
        (LEGACY, [word.replace("--node_ip=10.0.0.2", "--node_ip=10.0.0.9") for word in TWO_GPUS]),
    ],
)
def test_nothing_else_is_touched(environ: dict[str, str], command: list[str]) -> None:
    after = dict(environ)
    assert correct(after, command) == {}
    assert after == environ


def test_a_script_that_reads_its_rank_below_the_import_is_fine() -> None:
    script = "import os\nfrom fleet_train import fleet\nRANK = int(os.environ['PADDLE_TRAINER_ID'])\n"
    assert read_before_import(script) is None
    assert warning_of(script, {"PADDLE_TRAINER_ID": "0"}).startswith("the stock launcher set PADDLE_TRAINER_ID and")
    assert warning_of("RANK = os.environ['PADDLE_TRAINER_ID']", {}) == ""


@pytest.mark.parametrize(
    "line",
    [
        "RANK = int(os.environ['PADDLE_TRAINER_ID'])",
        "NUMBER = os.getenv('PADDLE_TRAINERS_NUM', '1')",
        "rank = paddle.distributed.get_rank()",
        "env = paddle.distributed.ParallelEnv()",
    ],
)
def test_a_script_that_reads_its_rank_above_the_import_is_warned_with_the_line(line: str) -> None:
    script = f"import os\n# PADDLE_TRAINER_ID is read below\n{line}\nimport fleet_train.fleet as fleet\n"
    assert read_before_import(script) == 3
    warning = warning_of(script, {"PADDLE_TRAINER_ID": "0"})
    assert warning.startswith("WARNING: ")
    assert "line 3 of the script is above that: move `import fleet_train` to its first line" in warning
    assert line not in warning


def test_a_process_is_corrected_once_and_its_launchers_values_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    before: dict[str, str | None] = {}
    monkeypatch.setattr(at_import, "_launched", before)
    for name in rank_variables(Cluster.single()):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delenv("FLEET_TRAIN_STORE", raising=False)
    monkeypatch.setattr(at_import, "parent_command", lambda: ["bash"])
    at_import.correct_this_process()
    assert before == {}
    assert at_import.launch_environment() == dict(os.environ)
    assert warning_of("RANK = os.environ['PADDLE_TRAINER_ID']") == ""
    monkeypatch.setattr(at_import, "parent_command", lambda: TWO_GPUS)
    legacy = {name: value for name, value in LEGACY.items() if name != "PADDLE_CURRENT_ENDPOINT"}
    for name, value in legacy.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        at_import.correct_this_process()
        assert os.environ["PADDLE_TRAINER_ID"] == "3"
        assert os.environ["PADDLE_CURRENT_ENDPOINT"] == "10.0.0.2:6171"
    assert before["PADDLE_TRAINER_ID"] == "1"
    assert before["PADDLE_CURRENT_ENDPOINT"] is None
    launched = at_import.launch_environment()
    assert {name: launched[name] for name in legacy} == legacy
    assert "PADDLE_CURRENT_ENDPOINT" not in launched
    assert warning_of(None).startswith("the stock launcher set PADDLE_TRAINER_ID")


POD = {
    "PADDLE_TRAINERS": "10.1.0.4,10.1.0.5",
    "POD_IP": "10.1.0.5",
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_PORT": "6007",
    "TRAINER_PORTS_NUM": "2",
    "PADDLE_TRAINER_ENDPOINTS": "10.1.0.4:6007,10.1.0.4:6008,10.1.0.5:6007,10.1.0.5:6008",
    "SECRET_TOKEN": "abc123",
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"PADDLE_TRAINERS": ""}, "PADDLE_TRAINERS is not set"),
        ({"POD_IP": ""}, "POD_IP is not set"),
        ({"POD_IP": "10.1.0.9"}, "POD_IP=10.1.0.9 is not in PADDLE_TRAINERS"),
        ({"PADDLE_TRAINER_ID": "0"}, "PADDLE_TRAINER_ID=0 contradicts POD_IP"),
        ({"PADDLE_TRAINER_ID": "one"}, "PADDLE_TRAINER_ID=one is not a whole number"),
        ({"PADDLE_PORT": "7000"}, "starts at port 6007, but PADDLE_PORT=7000"),
        ({"TRAINER_PORTS_NUM": "3"}, "PADDLE_TRAINER_ENDPOINTS has 4 entries"),
        ({"TRAINER_PORTS_NUM": "0"}, "TRAINER_PORTS_NUM=0"),
        ({"PADDLE_TRAINER_ENDPOINTS": "10.1.0.4"}, "PADDLE_TRAINER_ENDPOINTS is not a comma list"),
        ({"PADDLE_TRAINER_ENDPOINTS": "10.1.0.5:6007,10.1.0.4:6007"}, "PADDLE_TRAINER_ENDPOINTS names other hosts"),
    ],
)
def test_missing_and_contradicting_variables_are_named(change: dict[str, str], named: str) -> None:
    with pytest.raises(ClusterError, match=named) as caught:
        read_paddlecloud({**POD, **change})
    assert "abc123" not in str(caught.value)


def test_a_pod_is_read_and_flags_may_repeat_but_not_contradict_it() -> None:
    pod = {"PADDLE_TRAINERS": "10.1.0.4", "POD_IP": "10.1.0.4"}
    assert read_paddlecloud(pod) == CloudNode(("10.1.0.4",), "10.1.0.4", None, None)
    cloud = read_paddlecloud(POD)
    assert cloud == CloudNode(("10.1.0.4", "10.1.0.5"), "10.1.0.5", 6007, 2)
    assert cloud.merged(None, None, None) == (("10.1.0.4", "10.1.0.5"), "10.1.0.5", 6007)
    assert cloud.merged(None, "10.1.0.5", 7000)[2] == 7000
    with pytest.raises(ClusterError, match="--node_ip contradicts the variable POD_IP"):
        cloud.merged(None, "10.1.0.4", None)
