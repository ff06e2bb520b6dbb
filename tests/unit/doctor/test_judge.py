"""From facts to findings: tables of facts, with the expected level and host; and the line behind a failure's report."""

from __future__ import annotations

import re
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fleet_train.cluster.flight.stands import from_json
from fleet_train.doctor import pairs, report
from fleet_train.doctor.facts import (
    FAIL,
    GROUPS,
    PASS,
    UNLIMITED,
    WARN,
    Datagrams,
    Echo,
    Examination,
    Finding,
    Folder,
    GroupResult,
    Interface,
    Limits,
    Memory,
    NetworkFacts,
    NodeFacts,
    NodeReport,
    PortTry,
    Processors,
    Route,
    Software,
    Stream,
    exit_code,
    rate,
    size,
    verdict,
)
from fleet_train.doctor.judge import judge
from fleet_train.doctor.report import AfterFailure, lines, matrix
from fleet_train.launch.node import Node

GIB = 1 << 30
ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
SOFTWARE = Software("3.11.2", "3.3.1 (paddlepaddle)", "0.1.0", "2.4.6", "abc")


def network(index: int) -> NetworkFacts:
    own = ADDRESSES[index]
    interfaces = (Interface("eth0", (own,), 1500, 1000), Interface("lo", ("127.0.0.1",), 65536))
    routes = {i: Route("eth0", own) for i in range(3) if i != index}
    return NetworkFacts(f"node{index}", own, False, interfaces, routes, {})


def node(index: int) -> NodeReport:
    facts = NodeFacts(
        index,
        2,
        software=SOFTWARE,
        memory=Memory(64 * GIB, 32 * GIB, shm_total=32 * GIB, shm_free=32 * GIB),
        processors=Processors("a processor", 8, gflops=100.0, share=0.98),
        limits=Limits(65536, 8 << 20),
        folders=(Folder("logs", "/here/log", 100 * GIB, 10**6, 5e8),),
        network=network(index),
    )
    others = [i for i in range(3) if i != index]
    return NodeReport(
        facts,
        tries=tuple(PortTry(i, port, "open") for i in others for port in (6170, 6171, 6172, 40000)),
        echoes=tuple(Echo(i, 2e-4, 0.001, 1e-4) for i in others if i > index),
        datagrams=tuple(Datagrams(i, 1500, 1500, 1500) for i in others),
        streams=tuple(
            Stream(a, b, 1.17e8, 1.18e8, 50_000, 3) for i in others if i > index for a, b in ((index, i), (i, index))
        ),
    )


HEALTHY = Examination(ADDRESSES, {i: node(i) for i in range(3)}, {i: GroupResult(True, "ok", 5) for i in range(3)})


def with_facts(index: int, **changed: Any) -> Examination:
    return with_report(index, facts=replace(HEALTHY.reports[index].facts, **changed))


def with_network(index: int, **changed: Any) -> Examination:
    return with_facts(index, network=replace(network(index), **changed))


def with_report(index: int, **changed: Any) -> Examination:
    return replace(HEALTHY, reports=HEALTHY.reports | {index: replace(HEALTHY.reports[index], **changed)})


def alarms(examined: Examination) -> list[tuple[str, str, tuple[str, ...]]]:
    return [
        (finding.level, finding.id, finding.hosts)
        for finding in judge(examined, tuple(GROUPS))
        if finding.level != PASS
    ]


def host(index: int) -> str:
    return f"node {index} ({ADDRESSES[index]})"


def test_healthy_nodes_give_no_alarm_and_a_group_that_was_not_formed_one() -> None:
    broken = {0: GroupResult(True, "ok"), 1: GroupResult(False, "has not come to its end within 20 s", 20.0)}
    assert alarms(replace(HEALTHY, groups=broken)) == [(FAIL, "group", (host(1),))]
    assert alarms(HEALTHY) == []
    assert {finding.id for finding in judge(HEALTHY, tuple(GROUPS))} >= {"memory", "python", "port", "clock", "group"}


def test_what_was_found_of_data_has_the_host_where_it_was_found() -> None:
    slow = Finding("data", "data_speed", FAIL, (), "400 images/s", "training needs 1000/s", "--workers 5")
    examined = with_facts(1, data=(slow, replace(slow, id="data", level=PASS)))
    assert alarms(examined) == [(FAIL, "data_speed", (host(1),))]
    told = from_json(NodeReport, asdict(examined.reports[1]))
    assert told == examined.reports[1]


OWN = {
    "little memory": ({"memory": Memory(GIB, GIB - 9, shm_total=GIB, shm_free=GIB)}, FAIL, "memory"),
    "some memory": ({"memory": Memory(2 * GIB, 2 * GIB - 9, shm_total=GIB, shm_free=GIB)}, WARN, "memory"),
    "killed before": ({"memory": Memory(64 * GIB, 32 * GIB, GIB * 40, 1, GIB, GIB)}, WARN, "memory"),
    "a container's shm": ({"memory": Memory(64 * GIB, 32 * GIB, shm_total=64 << 20, shm_free=64 << 20)}, WARN, "shm"),
    "full shm": ({"memory": Memory(64 * GIB, 32 * GIB, shm_total=64 << 20, shm_free=9 << 20)}, FAIL, "shm"),
    "few files": ({"limits": Limits(256, UNLIMITED)}, FAIL, "open_files"),
    "some files": ({"limits": Limits(1000, UNLIMITED)}, WARN, "open_files"),
    "locked memory": ({"limits": Limits(65536, 65536, has_infiniband=True)}, FAIL, "locked_memory"),
    "few processors": ({"processors": Processors("", 1, gflops=100.0)}, WARN, "processors"),
    "a small quota": ({"processors": Processors("", 8, 0.5, 100.0)}, FAIL, "processors"),
    "busy": ({"processors": Processors("", 8, gflops=100.0, share=0.3)}, WARN, "busy"),
    "slow": ({"processors": Processors("", 8, gflops=75.0)}, WARN, "speed"),
    "very slow": ({"processors": Processors("", 8, gflops=45.0)}, FAIL, "speed"),
    "not timed": ({"processors": Processors("", 8)}, WARN, "speed"),
    "full disk": ({"folders": (Folder("logs", "/l", 9, 9999999, 1e9),)}, FAIL, "disk"),
    "slow disk": ({"folders": (Folder("logs", "/l", 9 * GIB, 9999999, 5e6),)}, WARN, "disk"),
    "no inodes": ({"folders": (Folder("logs", "/l", 9 * GIB, 5, 1e9),)}, FAIL, "disk"),
    "hanging disk": ({"folders": (Folder("logs", "/l", error="has not answered"),)}, FAIL, "disk"),
    "shared with one": ({"folders": (Folder("logs", "/l", 9 * GIB, -1, 1e9, "", (0,)),)}, WARN, "shared_folder"),
    "other Python": ({"software": replace(SOFTWARE, python="3.12.1")}, FAIL, "python"),
    "other Paddle": ({"software": replace(SOFTWARE, paddle="3.2.2 (paddlepaddle)")}, FAIL, "paddle"),
    "no Paddle": ({"software": replace(SOFTWARE, paddle="")}, FAIL, "paddle"),
    "other numpy": ({"software": replace(SOFTWARE, numpy="1.26")}, WARN, "numpy"),
    "other files": ({"software": replace(SOFTWARE, package_digest="abd")}, FAIL, "package"),
    "no profile": ({"software": replace(SOFTWARE, errors=("--strategy: none",))}, FAIL, "profile_or_script"),
}


NETWORK = {
    "name means 127": ({"resolved": "127.0.1.1"}, WARN, "own_name"),
    "listed by that name": ({"resolved": "127.0.1.1", "is_named": True}, FAIL, "own_name"),
    "name of another": ({"resolved": "10.0.0.77"}, WARN, "own_name"),
    "unknown name": ({"resolved": ""}, WARN, "own_name"),
    "held": ({"held": {6170: "process 5 (python)"}}, FAIL, "ports_held"),
    "proxy": ({"proxies": ("http_proxy",)}, WARN, "proxy"),
    "variable": ({"wrong_interface_variables": ("GLOO_SOCKET_IFNAME",)}, FAIL, "interface_variables"),
    "port range": ({"outgoing_ports": (1024, 65000)}, WARN, "ports_range"),
    "slow card": ({"interfaces": (Interface("eth0", ("10.0.0.2",), 1500, 100),)}, WARN, "card"),
}


OPEN = PortTry(2, 6170, "open")
PAIRS = {
    "closed": ({"tries": (OPEN, PortTry(2, 6171, "timed out"))}, FAIL, "port"),
    "vanish": ({"datagrams": (Datagrams(2, 1400, 1500, 1500),)}, FAIL, "mtu"),
    "a router says so": ({"datagrams": (Datagrams(2, 1400, 1400, 1500),)}, WARN, "mtu"),
    "no datagram": ({"datagrams": (Datagrams(2, 0, 1500, 1500),)}, WARN, "mtu"),
    "differ": ({"datagrams": (Datagrams(2, 1500, 9000, 9000),)}, WARN, "mtu"),
    "clock": ({"echoes": (Echo(2, 2e-4, -3.0, 1e-4),)}, WARN, "clock"),
    "wrong day": ({"echoes": (Echo(2, 2e-4, 86400.0, 1e-4),)}, FAIL, "clock"),
    "far": ({"echoes": (Echo(2, 8e-3, 0.0, 4e-3),)}, WARN, "latency"),
    "very far": ({"echoes": (Echo(2, 8e-2, 0.0, 4e-2),)}, FAIL, "latency"),
    "slow": ({"streams": (Stream(1, 2, 1.1e7, 1.2e7, 9999, 0),)}, WARN, "bandwidth"),
    "stands still": ({"streams": (Stream(1, 2, 0.0, error="stalled"),)}, FAIL, "bandwidth"),
    "loses some": ({"streams": (Stream(1, 2, 1.1e8, 1.2e8, 9999, 200),)}, WARN, "retransmits"),
    "loses many": ({"streams": (Stream(1, 2, 1.1e8, 1.2e8, 9999, 900),)}, FAIL, "retransmits"),
}


FAULTS = {name: (with_facts(1, **changed), level, id, (host(1),)) for name, (changed, level, id) in OWN.items()}
FAULTS |= {name: (with_network(1, **changed), level, id, (host(1),)) for name, (changed, level, id) in NETWORK.items()}
FAULTS |= {
    f"between two: {name}": (with_report(1, **changed), level, id, (host(1), host(2)))
    for name, (changed, level, id) in PAIRS.items()
}


ROUTES = {0: Route("", ""), 2: Route("eth0", ADDRESSES[1])}
_ALONE = with_network(0, held={6170: "process 5 (python)"})
FAULTS["held, alone"] = (
    replace(
        _ALONE, addresses=ADDRESSES[:1], reports={0: NodeReport(_ALONE.reports[0].facts)}, groups={0: HEALTHY.groups[0]}
    ),
    WARN,
    "ports_held",
    ("this machine",),
)
FAULTS["no route"] = (with_network(1, routes=ROUTES), FAIL, "route", (host(1), host(0)))


def test_unlike_numbers_of_processes_are_no_fault_if_the_node_list_gives_them() -> None:
    unlike = with_facts(1, processes=1)
    assert [one.id for one in judge(unlike, tuple(GROUPS)) if one.level == FAIL] == ["flags"]
    assert [one for one in judge(replace(unlike, counts=(2, 1, 2)), tuple(GROUPS)) if one.level == FAIL] == []
    assert [one.id for one in judge(replace(unlike, counts=(1, 2, 2)), tuple(GROUPS)) if one.level == FAIL] == ["flags"]


@pytest.mark.parametrize(("examined", "level", "id", "hosts"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_named_with_its_node_or_its_direction(
    examined: Examination, level: str, id: str, hosts: tuple[str, ...]
) -> None:
    assert alarms(examined) == [(level, id, hosts)]
    findings = judge(examined, tuple(GROUPS))
    assert [one for one in findings if one.level != PASS and not (one.threshold and one.fix)] == []


HARMFUL = re.compile(
    r"sed -i|tee|>>|echo |printf |rm |kill|route (add|del|replace)|apt-get|pip install .*paddlepaddle=="
)
"""What edits a file by a pattern, ends the unknown, cuts a machine off, or installs one build over another."""


@pytest.mark.parametrize("examined", [fault[0] for fault in FAULTS.values()], ids=FAULTS.keys())
def test_no_fix_harms_a_machine_that_is_not_as_expected(examined: Examination) -> None:
    for finding in judge(examined, tuple(GROUPS)):
        if finding.level != PASS and "Paddle is not installed" not in finding.measured:
            assert not HARMFUL.search(finding.fix), finding.fix


def fix_of(examined: Examination, id: str) -> str:
    (fix,) = [finding.fix for finding in judge(examined, tuple(GROUPS)) if finding.id == id and finding.level != PASS]
    return fix


def test_fixes_leave_what_is_right_as_it_is() -> None:
    hosts = fix_of(with_network(1, host_name="vm", resolved="127.0.1.1"), "own_name")
    assert "gives vm the address 127.0.1.1, take that one name out of it and leave its other names" in hosts
    assert "add the line '10.0.0.2 vm' to /etc/hosts there" in hosts
    full = with_facts(1, memory=Memory(64 * GIB, 32 * GIB, shm_total=16 * GIB, shm_free=9 << 20))
    assert "size=17G" in fix_of(full, "shm"), "what is in it, and room beside it"
    little = with_facts(1, memory=Memory(64 * GIB, 32 * GIB, shm_total=64 << 20, shm_free=64 << 20))
    assert "size=1G" in fix_of(little, "shm")
    assert "tracepath" in fix_of(with_report(1, datagrams=(Datagrams(2, 576, 1500, 1500),)), "mtu"), "IPv6 needs 1280"
    assert "mtu 1400 on node 1 (10.0.0.2), and dev eth0 on node 2" in fix_of(
        with_report(1, datagrams=(Datagrams(2, 1400, 1500, 1500),)), "mtu"
    )
    assert "iptables" in fix_of(with_report(1, tries=(OPEN, PortTry(2, 6171, "timed out"))), "port")
    proxy = with_network(1, proxies=("http_proxy",))
    script = f'NO_PROXY=internal; {fix_of(proxy, "proxy")}; echo "$no_proxy"'
    shell = subprocess.run(["sh", "-c", script], env={}, capture_output=True, text=True, check=True)
    assert shell.stdout.strip() == "internal,10.0.0.1,10.0.0.2,10.0.0.3"


def test_one_machine_is_not_counted_twice() -> None:
    two = tuple(Folder(purpose, f"/here/{purpose}", 100 * GIB, 10**6, 5e8) for purpose in ("logs", "output"))
    alone = replace(HEALTHY, addresses=ADDRESSES[:1], reports={0: with_facts(0, folders=two).reports[0]})
    (shown,) = [line for line in lines(judge(alone, ("machine",)), everything=True) if line.startswith("PASS  disk")]
    assert shown.startswith("PASS  disk  this machine: /here/logs (logs): ")
    assert "2 hosts" not in shown


def test_what_is_wrong_comes_first_and_what_was_passed_in_one_line() -> None:
    examined = with_report(1, tries=(OPEN, PortTry(2, 6171, "timed out")))
    shown = list(lines(judge(examined, tuple(GROUPS)), everything=False))
    levels = [line.split()[0] for line in shown]
    assert levels == sorted(levels, key=("FAIL", "WARN", "PASS").index)
    assert levels.count("PASS") == 1
    assert shown[0].startswith("FAIL  port  ")
    assert shown[-1].endswith(" (--verbose: what was measured)")
    assert " memory, " in shown[-1]


def test_what_is_not_known_well_or_too_fast_to_compare_is_no_alarm() -> None:
    assert "clock" not in {id for _, id, _ in alarms(with_report(1, echoes=(Echo(2, 4e-3, 1.5, 0.6),)))}
    examined = with_report(1, streams=(Stream(1, 2, 4e8, 4e8, 9999, 0),))  # one process cannot fill such links
    others = tuple(Stream(0, i, 3e9, 3e9, 9999, 0) for i in (1, 2) for _ in range(3))
    examined = replace(examined, reports=examined.reports | {0: replace(examined.reports[0], streams=others)})
    assert alarms(examined) == []


def test_who_did_not_come_is_named_and_has_an_exit_code_of_its_own() -> None:
    without = replace(HEALTHY, reports={i: HEALTHY.reports[i] for i in (0, 2)}, present=(0, 2))
    tried = PortTry(1, 6170, "timed out"), PortTry(1, 6171, "timed out")
    reports = {i: replace(told, tries=tried[:n]) for n, (i, told) in enumerate(without.reports.items())}
    for examined, why in (
        (replace(without, reports=reports), f"did not connect; its ports, from {host(2)}: timed out"),
        (replace(without, present=(0, 1, 2)), "came, but its report did not arrive"),
    ):
        findings = judge(examined, ("network",))
        (absent,) = [finding for finding in findings if finding.level == FAIL]
        assert (absent.hosts, absent.measured) == ((host(1),), why)
        assert exit_code(findings) == 6


def test_who_runs_and_is_not_admitted_by_node_0_is_not_taken_for_one_that_does_not() -> None:
    others = {i: replace(HEALTHY.reports[i], tries=(PortTry(1, 6170, "open"),)) for i in (0, 2)}
    (absent,) = [one for one in judge(replace(HEALTHY, reports=others), ("network",)) if one.level == FAIL]
    assert f"from {host(0)}, {host(2)}: open" in absent.measured
    assert f"{host(0)}, which all connect to, does not admit it" in absent.measured


def test_who_is_cut_off_says_so_of_node_0_and_what_it_can_dial_itself() -> None:
    tries = (PortTry(0, 6170, "timed out"), PortTry(1, 6170, "refused"), PortTry(1, 6171, "refused"))
    own = replace(HEALTHY.reports[2], tries=tries, echoes=(), datagrams=(), streams=())
    alone = replace(HEALTHY, reports={2: own}, groups={}, cut_off="cannot be reached from here: port 6170: timed out")
    findings = judge(alone, tuple(GROUPS))
    absent, *ports = [finding for finding in findings if finding.level == FAIL]
    assert (absent.id, absent.hosts, exit_code(findings)) == ("absent", (host(0),), 6)
    assert absent.measured.startswith("cannot be reached from here: port 6170: timed out; nobody else can be asked")
    assert [(each.hosts, each.measured) for each in ports] == [
        ((host(2), host(0)), "port 6170: timed out"),
        ((host(2), host(1)), "port 6170, 6171: refused"),
    ]
    assert ["start the same command on" in each.fix for each in ports] == [False, True]
    assert {finding.id for finding in findings if finding.level == PASS} >= {"memory", "python", "own_name"}


def test_nodes_that_were_started_differently_are_named_instead_of_absent_ones() -> None:
    said = (
        "node 1 (10.0.0.2) and node 0 (10.0.0.1) were started differently: --started_port is 6180 there and 6170 here"
    )
    reports = {i: HEALTHY.reports[i] for i in (0, 2)}
    examined = replace(
        HEALTHY, reports=reports, present=(0, 2), difference=f"{said}; start every node with the same flags"
    )
    for groups in (tuple(GROUPS), ("machine",)):
        (found,) = [each for each in judge(examined, groups) if each.level == FAIL]
        assert (found.id, found.hosts, found.measured) == ("flags", (host(1),), said)
        assert exit_code([found]) == 1
    assert alarms(with_facts(1, processes=3))[0] == (FAIL, "flags", (host(0), host(1), host(2)))


def test_exit_codes_and_verdicts() -> None:
    good, odd, bad = (Finding("machine", "memory", level, ("a",), "m") for level in (PASS, WARN, FAIL))
    assert [exit_code(findings) for findings in ([good], [good, odd], [odd, bad])] == [0, 0, 1]
    assert verdict([good, good], 3.2) == "OK (2 PASS, in 3 s)"
    assert verdict([good, odd], 3.2) == "OK, with warnings (1 WARN, 1 PASS, in 3 s)"
    assert verdict([bad, odd], 3.2) == "FAIL: memory on a (1 FAIL, 1 WARN, in 3 s)"


def test_lines_join_what_passes_and_the_matrix_has_every_pair() -> None:
    shown = list(lines(judge(HEALTHY, tuple(GROUPS)), everything=True))
    assert len(shown) == len({line.split("  ")[1] for line in shown})
    table = matrix(HEALTHY)
    assert table[1].split()[:4] == ["node", "0", "-", "936"]
    assert "not measured" not in "".join(table)
    assert [size(number) for number in (999, 1.5e9, 2e13)] == ["999 B", "1.5 GB", "20 TB"]
    assert [rate(number) for number in (1.25e8, 2.5e9, 1e5)] == ["1000 Mb/s", "20.0 Gb/s", "0.80 Mb/s"]


def test_facts_survive_json_and_nonsense_is_refused() -> None:
    told = HEALTHY.reports[1]
    assert from_json(NodeReport, asdict(told)) == told
    for nonsense in ({}, {"facts": 1, "tries": []}, asdict(told) | {"tries": ["x"]}, []):
        with pytest.raises(ValueError, match="validation error"):
            from_json(NodeReport, nonsense)


ALONE = Node(("127.0.0.1",), 0, 6170, 1, None, "lo")
TWO = Node(("127.0.0.2", "127.0.0.3"), 0, 6170, 1, None, "lo")


def test_a_failures_report_has_no_line_where_nothing_is_found(tmp_path: Path) -> None:
    assert AfterFailure(ALONE, tmp_path).line() == ""
    assert AfterFailure(TWO, tmp_path).line() == ""  # a node that refuses is there


def test_a_process_that_was_killed_for_want_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vmstat").write_text("pgfree 1\noom_kill 3\n")
    assert [report.oom_kills(tmp_path / name) for name in ("vmstat", "none")] == [3, 0]
    asked = AfterFailure(ALONE, tmp_path)
    monkeypatch.setattr(report, "oom_kills", lambda: asked._kills + 1)
    line = asked.line()
    assert line.startswith("doctor: FAIL  memory  node 0 (127.0.0.1): ")
    assert "1 processes were killed for lack of memory" in line
    assert line.endswith("; more: fleet_train doctor")
    assert "\n" not in line


def test_a_node_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(pairs, "connect_from", silent)
    line = AfterFailure(TWO, tmp_path).line()
    assert "FAIL  port  node 0 (127.0.0.2) -> node 1 (127.0.0.3): a connection to port 6171: timed out" in line
    assert line.endswith("fleet_train doctor --ips 127.0.0.2,127.0.0.3")
