"""What the selftest makes of its findings: lines, verdicts, which rank is blamed, a record without names."""

from __future__ import annotations

import itertools
import socket
from dataclasses import replace
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from fleet_train.cli.selftest import command
from fleet_train.cluster.cluster import Cluster, assign
from fleet_train.errors import ClusterError, WorkerFailed
from fleet_train.launch.on_ranks import SubjectEnd, Where, request_of
from fleet_train.profile import load_profile, profile_names
from fleet_train.profile.profile import open_knobs
from fleet_train.selftest import check_collectives, check_memory, check_profiles, record, supervisor
from fleet_train.selftest.ladder import STEPS, Ladder, lines_of_nccl
from fleet_train.selftest.options import FAIL, GROUPS, OK, SKIP, Result, SelftestOptions, chosen, exit_code, verdict
from fleet_train.selftest.supervisor import command_of, judge_ends, not_done

CLUSTER = Cluster(assign(["10.0.0.1", "10.0.0.2"], 2, 6170), 0)


def ended(
    code: int, at: float, why_killed: str, began: str, lines: tuple[str, ...] = (), nccl: tuple[str, ...] = ()
) -> SubjectEnd:
    return SubjectEnd(code, at, why_killed, ({"begins": began},), lines, nccl)


def result(name: str, status: str) -> Result:
    return Result("devices", name, status, "words")


@pytest.mark.parametrize(
    ("results", "words", "code"),
    [
        ([result("a", OK), result("b", OK), result("c", SKIP)], "PASSED: 2 ok, 1 skip, in 12 s", 0),
        (
            [result("a", OK), result("b", FAIL), result("b", FAIL), result("c", FAIL)],
            "FAILED: b, c; 1 ok, in 12 s",
            1,
        ),
        ([], "NOTHING was checked", 1),
        ([result("a", SKIP)], "NOTHING was checked", 1),
    ],
)
def test_a_verdict_names_each_failed_check_once(results: list[Result], words: str, code: int) -> None:
    assert verdict(results, 12.4).startswith(words)
    assert exit_code(results) == code


def test_a_result_survives_json_and_is_one_line() -> None:
    failed = Result("faults", "a rank is killed", FAIL, "why", 1.5, {"seconds": {"0": 1}})
    assert Result.from_json(failed.to_json()) == failed
    assert failed.line == "FAIL  a rank is killed: why"


def test_checks_are_chosen_in_their_order() -> None:
    assert chosen(["faults", "devices"], []).groups == ("devices", "faults")
    assert chosen([], ["faults"]).groups == tuple(GROUPS)[:-1]
    with pytest.raises(ClusterError, match="leave nothing to check; the checks are devices, collectives"):
        chosen(["faults"], ["faults"])
    asked = record.command_of(chosen(["faults", "devices"], [], quick=True))
    assert asked == "fleet_train selftest --only devices --only faults --quick"
    quick = chosen([], [], quick=True)
    assert (quick.is_quick, SelftestOptions().is_quick) == (True, False)
    assert SelftestOptions.from_json(quick.to_json()) == quick


@pytest.mark.parametrize("flag", ["--only", "--skip"])
def test_a_check_that_is_no_more_is_refused_with_what_to_use(flag: str) -> None:
    ended = CliRunner().invoke(command, [flag, "overlap"])
    assert ended.exit_code == 2
    assert "launch --trace STEPS and timeline show what a step waits for" in ended.output
    assert "'devices', 'collectives', 'profiles', 'faults'" in CliRunner().invoke(command, [flag, "all"]).output


class TestFaults:
    GOOD = ended(WorkerFailed.exit_code, 103.0, "", "", ("noise", "fleet_train: rank 3 (10.0.0.2:6171) is gone"))

    def judged(self, **changes: Any) -> Result:
        if "seconds" in changes:
            changes["ended_at"] = 100.0 + changes.pop("seconds")
        ends = dict.fromkeys(range(2), self.GOOD) | {2: replace(self.GOOD, **changes)}
        return supervisor.judge_faults(CLUSTER, "is killed", SelftestOptions(), ends, 100.0, 5.0)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"seconds": 14.1}, "rank 2 (10.0.0.2:6170) ended after 14.1 s, 14 s are allowed"),
            ({"why_killed": "late", "seconds": 19.0}, "had not ended 19.0 s after the fault and was killed"),
            ({"exit_code": 1}, "ended with exit code 1, expected 11: fleet_train: rank 3"),
            ({"exit_code": -6}, "ended with signal 6, expected 11"),
            ({"last_lines": ("fleet_train: rank 0 (10.0.0.1:6170) is gone",)}, "does not name rank 3 (10.0.0.2:6171)"),
            ({"last_lines": ()}, "does not name rank 3 (10.0.0.2:6171): it printed nothing"),
        ],
    )
    def test_one_rank_that_does_not_end_in_time_and_name_it_is_enough(
        self, changes: dict[str, Any], reason: str
    ) -> None:
        result = self.judged(**changes)
        assert result.status == FAIL
        assert reason in result.words
        assert result.words.endswith("; rank 3 (10.0.0.2:6171) was killed")
        result = self.judged(seconds=13.9)
        assert result.status == OK
        assert result.words.endswith("ended within 13.9 s (14 s allowed) and named rank 3 (10.0.0.2:6171)")


class PlayedPeers:
    """Supervisors whose ranks all see what rank 0 does. ``results``: of a step's job; ``ends``: of its ranks."""

    FAULT = ended(WorkerFailed.exit_code, 101.0, "", "", ("fleet_train: rank 1 (10.0.0.1:6171) was lost",))

    def __init__(self, ranks: int, results: dict[str, list[Result]], ends: dict[str, list[SubjectEnd]]) -> None:
        self.cluster = Cluster(assign(["10.0.0.1"], ranks, 6170), 0)
        self.shown: list[str] = []
        self.jobs: dict[str, float] = {}
        self._results, self._ends = results, ends

    def run(
        self, job: str, argument: Any, limit: float, on_report: Any, _: Any
    ) -> tuple[dict[int, SubjectEnd], Cluster]:
        assert argument["ladder"]
        self.jobs[job] = limit
        if job.startswith("is killed"):
            self._ends.setdefault(job, [self.FAULT, ended(-9, 100.0, "", "", ())])
        else:
            for result in self._results.get(job, [Result("devices", job, OK, "good")]):
                on_report({"result": result.to_json()})
        good = [ended(0, 1.0, "", "")] * self.cluster.world_size
        return dict(enumerate(self._ends.get(job, good))), self.cluster

    def gather(self, _: str, value: Any = None, __: float | None = None) -> dict[int, Any]:
        return dict.fromkeys(range(self.cluster.world_size), value)

    def note(self, key: str) -> None: ...

    def noted(self, key: str) -> float | None:
        return 100.0 if key.startswith("fault of is killed") else None

    def clock(self) -> float:
        return 100.0

    def show(self, text: str) -> None:
        self.shown.append(text)


class TestLadder:
    NAMES = tuple(step.name for step in STEPS)

    def climbed(
        self,
        ranks: int = 2,
        results: dict[str, list[Result]] | None = None,
        ends: dict[str, list[SubjectEnd]] | None = None,
    ) -> tuple[list[Result], PlayedPeers]:
        peers: Any = PlayedPeers(ranks, results or {}, ends or {})
        found, _ = Ladder(peers, chosen([], [], quick=True, ladder=True)).run()
        return found, peers

    def test_every_step_runs_in_its_order_and_waits_for_a_bounded_time(self) -> None:
        results, peers = self.climbed()
        assert [result.name.removeprefix("a rank ") for result in results] == list(self.NAMES)
        assert {result.status for result in results} == {OK}
        assert exit_code(results) == 0
        assert tuple(peers.jobs) == self.NAMES
        assert max(peers.jobs.values()) <= 320
        assert not any("what to do" in line for line in peers.shown)

    def test_what_is_skipped_ends_nothing(self) -> None:
        skipped = {"devices": [Result("devices", "devices", SKIP, "the ranks compute on CPUs")]}
        results, _ = self.climbed(results=skipped)
        assert len(results) == len(STEPS)
        assert exit_code(results) == 0

    def test_one_rank_has_devices_only(self) -> None:
        results, peers = self.climbed(ranks=1)
        assert tuple(peers.jobs) == ("devices",)
        assert {(result.status, result.words) for result in results[1:]} == {(SKIP, "one rank has no peer")}
        assert [result.name for result in results[1:]] == list(self.NAMES[1:])

    @pytest.mark.parametrize(
        ("step", "setting"),
        [
            ("devices", "--selected_gpus of launch, or CUDA_VISIBLE_DEVICES"),
            ("dtypes", "NCCL_P2P_DISABLE: 1 or NCCL_IB_DISABLE: 1"),
            ("calc", "amp_level: O0"),
            ("own", "set collective_stream: calc"),
            ("memory of own", "collective_stream: calc needs no second stream"),
        ],
    )
    def test_the_first_failure_ends_it_and_says_which_setting_goes_around_it(self, step: str, setting: str) -> None:
        good, bad = Result("devices", "first", OK, "good"), Result("devices", "second", FAIL, "wrong")
        results, peers = self.climbed(results={step: [good, bad]})
        done = self.NAMES.index(step)
        assert tuple(peers.jobs) == self.NAMES[: done + 1]
        assert [result.status for result in results] == [OK] * (done + 1) + [FAIL] + [SKIP] * (len(STEPS) - done - 1)
        failed = results[done + 1]
        assert failed.words.startswith("wrong; what to do: ")
        assert setting in failed.words
        assert {result.words for result in results[done + 2 :]} <= {f"not run: '{step}' has failed"}
        assert exit_code(results) == 1

    def test_a_rank_that_crashes_or_hangs_fails_its_step_and_nccls_lines_are_shown(self) -> None:
        crashed = ended(-11, 5.0, "", "own", ("Segmentation fault",), ("NCCL WARN Cuda failure",))
        lost = ended(WorkerFailed.exit_code, 4.0, "", "own", ("rank 1 was lost",), ("NCCL INFO comm destroyed",))
        results, peers = self.climbed(ends={"own": [lost, crashed]})
        failed = next(result for result in results if result.status == FAIL)
        assert failed.line.startswith(
            "FAIL  own: rank 1 (10.0.0.1:6171) ended with signal 11: Segmentation fault; what"
        )
        assert "      NCCL WARN Cuda failure" in peers.shown
        assert not any("comm destroyed" in line for line in peers.shown)
        hangs = ended(-9, 500.0, "did not end within 320 s", "start", ())
        results, _ = self.climbed(results={"dtypes": []}, ends={"dtypes": [hangs, hangs]})
        assert results[1].line.startswith("FAIL  dtypes: rank 0 (10.0.0.1:6170) did not end within 320 s and was")

    def test_a_step_without_a_result_has_not_passed(self) -> None:
        results, _ = self.climbed(results={"own": []})
        assert results[3].line.startswith("FAIL  own: its ranks ended without a result; what to do: set")

    def test_a_kill_that_the_others_survive_for_too_long_fails(self) -> None:
        slow = replace(PlayedPeers.FAULT, ended_at=130.0, lines_of_nccl=("NCCL INFO waits",))
        kind = "is killed in a save"
        results, peers = self.climbed(ends={kind: [slow, ended(-9, 100.0, "", "", ())]})
        failed = next(result for result in results if result.status == FAIL)
        assert failed.words.startswith("rank 0 (10.0.0.1:6170) ended after 30.0 s, 14 s are allowed; rank 1")
        assert "was killed in a save; what to do: " in failed.words
        assert "collective_timeout_seconds" in failed.words
        assert peers.shown[peers.shown.index(failed.line) + 1] == "      NCCL INFO waits"

    def test_nccls_lines_are_those_of_who_failed_first_or_of_rank_0(self) -> None:
        good = ended(0, 1.0, "", "", (), ("of 0",))
        assert lines_of_nccl({0: good, 1: replace(good, lines_of_nccl=("of 1",))}) == ("of 0",)
        assert lines_of_nccl({0: good, 1: replace(good, exit_code=1, lines_of_nccl=("of 1",))}) == ("of 1",)
        assert lines_of_nccl({}) == ()

    def test_it_is_asked_for_alone_and_is_in_the_commands(self, tmp_path: Path) -> None:
        options = chosen([], [], quick=True, ladder=True)
        assert SelftestOptions.from_json(options.to_json()) == options
        assert record.command_of(options) == "fleet_train selftest --ladder --quick"
        assert command_of(options, tmp_path).arguments[-2:] == ["--ladder", "--quick"]
        assert "--ladder" not in command_of(chosen([], []), tmp_path).arguments
        for flag in ("--only", "--skip"):
            refused = CliRunner().invoke(command, ["--ladder", flag, "faults"])
            assert refused.exit_code == 2
            assert "leave out --only and --skip" in refused.output


class TestStreams:
    def judged(self, stream: str = "own", carried_out: str = "own", tolerance: float = 0.0, **changes: Any) -> Result:
        first = {"end": "a", "moved": 0.5, "difference": 0.0} | changes
        everybody = {0: first, 1: {"end": "a", "moved": 0.5, "difference": 0.0}}
        job: Any = SimpleNamespace(cluster=CLUSTER)
        return check_profiles.judge_stream(job, "label", stream, carried_out, 20, everybody, tolerance, 1.0)

    def test_equal_bits_pass_and_so_does_what_is_near(self) -> None:
        assert self.judged().line == "ok    label: 20 steps, the bits of calc, replicas bit-equal"
        near = self.judged("calc", "calc", 1e-5, difference=2e-6)
        assert (
            near.words == "20 steps, 2.0e-06 from one process with the joint batch (1e-05 allowed), replicas bit-equal"
        )

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"difference": 1e-9}, "after 20 steps 1.0e-09 from calc, 0e+00 is allowed"),
            ({"difference": float("nan"), "tolerance": 1e-5}, "after 20 steps nan from calc"),
            ({"end": "b"}, "after 20 steps rank 1 (10.0.0.1:6171) holds other parameters than rank 0"),
            ({"moved": 0.0}, "the parameters have not changed"),
            ({"carried_out": "calc"}, "the proof has found results that differ: all ranks went on with calc"),
            (
                {"carried_out": "calc", "end": "b"},
                "the proof has found results that differ: all ranks went on with calc; a",
            ),
        ],
    )
    def test_what_is_wrong_is_said(self, changes: dict[str, Any], reason: str) -> None:
        result = self.judged(**changes)
        assert result.status == FAIL
        assert result.words.startswith(reason)


class TestEnds:
    GOOD = ended(0, 9.0, "", "", ("done",))

    def test_who_has_lost_another_is_not_blamed(self) -> None:
        assert judge_ends(CLUSTER, dict.fromkeys(range(4), self.GOOD)) == []
        lost = ended(WorkerFailed.exit_code, 1.0, "", "profiles", ("rank 2 was lost",))
        crashed = ended(-11, 2.0, "", "profiles", ("", "Segmentation fault"))
        (result,) = judge_ends(CLUSTER, {0: self.GOOD, 1: lost, 2: crashed, 3: lost})
        assert (result.group, result.status) == ("profiles", FAIL)
        assert result.words == "rank 2 (10.0.0.2:6170) ended with signal 11: Segmentation fault"
        (result,) = judge_ends(CLUSTER, {0: ended(-9, 900.0, "did not end within 9 s", "profiles", ())})
        assert result.words == "rank 0 (10.0.0.1:6170) did not end within 9 s and was killed: it printed nothing"

    def test_what_comes_behind_is_not_done(self) -> None:
        groups = tuple(GROUPS)
        assert [result.name for result in not_done(groups, "collectives")] == ["profiles"]
        names = [result.name for result in not_done(groups, "start")]
        assert names == ["devices", "collectives", "profiles"]
        assert not_done(("faults", "devices"), "collectives") == []


class TestCollectives:
    @pytest.mark.parametrize("world", [2, 3, 16, 200])
    def test_sums_are_exact_in_every_dtype(self, world: int) -> None:
        total = np.sum([check_collectives.values_of(rank, world) for rank in range(world)], axis=0)
        assert total.max() <= 255  # uint8, and bfloat16's 8 bits
        assert len({check_collectives.values_of(rank, world).tobytes() for rank in range(2)}) == 2

    def test_what_is_wrong_is_said(self) -> None:
        expected = np.arange(4)
        assert check_collectives.difference("int32", np.arange(4.0), expected) == ""
        assert check_collectives.difference("int32", np.arange(8.0), expected) == "int32: 8 values instead of 4"
        inf = np.array([0, 1, np.inf, np.nan])
        expected_text = "float16: 2 of 4 values are wrong, the first at 2: inf instead of 2"
        assert check_collectives.difference("float16", inf, expected) == expected_text


class TestDevices:
    TABLE = "0, GPU-aa1\n1, GPU-bb2\n2, GPU-cc3\n"

    @pytest.mark.parametrize(
        ("visible", "index", "uuid"),
        [
            (None, 1, "GPU-bb2"),
            ("all", 2, "GPU-cc3"),
            ("2,0", 0, "GPU-cc3"),
            ("GPU-bb2,GPU-aa1", 1, "GPU-aa1"),
            ("GPU-bb", 0, "GPU-bb2"),
            ("2,0", 2, ""),
            (None, 3, ""),
        ],
    )
    def test_uuid_of_what_a_process_sees(self, visible: str | None, index: int, uuid: str) -> None:
        environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        assert check_collectives.uuid_of(index, environ, self.TABLE) == uuid
        assert check_collectives.uuid_of(index, environ, "") == ""  # there is no nvidia-smi

    def judged(self, *uuids: str) -> Result:
        devices = {rank: {"name": "A100", "memory_bytes": 1, "uuid": uuid} for rank, uuid in enumerate(uuids)}
        job: Any = SimpleNamespace(cluster=CLUSTER)
        return check_collectives.judge_devices(job, devices, 0.0)

    def test_each_rank_has_one_of_its_own_on_its_node(self) -> None:
        assert self.judged("a", "b", "a", "b").words == "4 distinct: A100"  # virtual machines may number alike
        shared = self.judged("a", "b", "c", "c")
        assert shared.status == FAIL
        assert shared.words.startswith("rank 2 (10.0.0.2:6170) and rank 3 (10.0.0.2:6171) compute on one GPU")
        assert self.judged("a", "").words.startswith("the UUID of rank 1 (10.0.0.1:6171)'s GPU is unknown")

    def test_values_are_on_the_device_of_their_rank(self) -> None:
        job: Any = SimpleNamespace(cluster=CLUSTER)
        good = {rank: (["Place(gpu:0)"], "Place(gpu:0)") for rank in range(2)}
        assert check_collectives.judge_places(job, good, 1.0).status == OK
        elsewhere = check_collectives.judge_places(job, good | {1: (["Place(cpu)"], "Place(gpu:1)")}, 1.0)
        assert elsewhere.status == FAIL
        assert elsewhere.words == (
            "rank 1 (10.0.0.1:6171)'s device is Place(gpu:1), a program's values are on Place(cpu)"
        )


def test_memory_is_that_of_the_rank_with_the_most_beside_paddles_own_program() -> None:
    result = check_memory.judge("own", {0: [100 * 2**20, 110 * 2**20], 1: [90 * 2**20, 130 * 2**20]}, 1.0)
    assert (result.name, result.status, result.figures["extra_bytes"]) == ("memory of own", OK, 40 * 2**20)
    assert result.words.startswith("40 MiB beside the 90 MiB of Paddle's own program on one rank")


def test_memory_is_the_most_of_each_program_beside_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's calls, played: the counts are those of one process, in which the plain program stays."""
    steps: list[Any] = []
    allocated, most = iter([100, 120]), iter([150, 200])
    device = SimpleNamespace(
        reset_max_memory_allocated=lambda: steps.append("reset"),
        memory_allocated=lambda: next(allocated),
        max_memory_allocated=lambda: next(most),
    )

    def program(profile: Any) -> Any:
        steps.append(profile and profile.collective_stream)
        return SimpleNamespace(step=lambda *_: steps.append("step"))

    monkeypatch.setattr(check_memory.paddle.device, "cuda", device)
    monkeypatch.setattr(check_memory.paddle.device, "synchronize", lambda: steps.append("done"))
    monkeypatch.setattr(check_memory, "computes_on_gpu", lambda: True)
    monkeypatch.setattr(check_memory, "_program", program)
    job: Any = SimpleNamespace(cluster=CLUSTER, all_gather=lambda _, value: {0: value})
    (result,) = check_memory.check(job, SelftestOptions(), "own")
    assert result.figures == {"plain_bytes": 50, "our_bytes": 80, "extra_bytes": 30}
    assert steps == ["reset", None, *["step"] * 5, "done", "reset", "own", *["step"] * 5, "done"]


class TestFitting:
    @pytest.mark.parametrize(("name", "steps"), list(itertools.product(profile_names(), [20, 50])))
    def test_every_profile_is_past_its_warm_up(self, name: str, steps: int) -> None:
        asked, fitted = load_profile(name), check_profiles.fit(load_profile(name), steps)
        profile = fitted.profile
        assert profile.local_sgd_is_warm_steps + 2 * profile.local_sgd_steps < steps or not profile.use_local_sgd
        assert profile.compression != "powersgd" or profile.powersgd_start_step < steps / 2
        assert not any(variable.startswith("NCCL_") for variable in profile.environment)
        left = set(fitted.changed) | {"environment", "collective_timeout_seconds", "divergence_check_steps"}
        left |= set(open_knobs(load_profile(name)))  # several buckets are to be tried, also where one would be chosen
        assert {knob for knob, value in profile if value != getattr(asked, knob)} <= left

    @pytest.mark.parametrize(
        ("name", "on_gpu", "tolerance"),
        [
            ("multi_node", False, check_profiles.EXACT),
            ("multi_node", True, check_profiles.APPROXIMATED),
            ("powersgd", False, check_profiles.APPROXIMATED),
            ("amp_bf16", False, check_profiles.APPROXIMATED),
            ("bf16_compression", False, check_profiles.APPROXIMATED),
            ("diloco", True, check_profiles.APPROXIMATED),
            ("int4_compression", False, check_profiles.APPROXIMATED),
        ],
    )
    def test_tolerances(self, name: str, on_gpu: bool, tolerance: float) -> None:
        assert check_profiles.tolerance_of(load_profile(name), on_gpu=on_gpu) == tolerance


NAMED = Cluster(assign(["10.0.0.1", "gpu-a.example.org"], 2, 6170), 0)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("rank 1 (10.0.0.1:6171) is gone", "rank 1 (node 0) is gone"),
        ("rank 3 (gpu-a.example.org:6171) is gone", "rank 3 (node 1) is gone"),
        ("peer_str = [10.0.0.1]:28808", "peer_str = [node 0]:28808"),
        ("from 10.0.0.11 and 192.168.7.7:80", "from <address> and <address>:80"),
        (f"on {socket.gethostname()}", "on <host>"),
        (f"{Path.home()}/x", "~/x"),
        ("paddle 3.3.1 after 1.5 s", "paddle 3.3.1 after 1.5 s"),
    ],
)
def test_texts_lose_their_names(text: str, clean: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert record.without_names(text, NAMED) == clean


def test_a_package_that_was_installed_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record.fleet_train, "__file__", str(tmp_path / "site-packages/fleet_train/__init__.py"))
    made = record.make(NAMED, SelftestOptions(), [record.facts()] * 2, [], 3.0)
    assert "commit" not in made["circumstances"]
    versions = record.write(tmp_path, made).with_suffix(".md").read_text().split("- Versions: ")[1].splitlines()[0]
    assert versions.endswith(f"fleet_train {record.fleet_train.__version__}.")


def test_backend_is_paddles_build_or_what_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "installed_paddle", lambda: ("paddlepaddle-gpu", "3.3.1"))
    assert record.backend_of({}) == "nccl"
    assert record.backend_of({"PADDLE_DISTRI_BACKEND": "gloo"}) == "gloo"
    monkeypatch.setattr(record, "installed_paddle", lambda: ("paddlepaddle", "3.3.1"))
    assert record.backend_of({}) == "gloo"


def test_our_launcher_is_asked_for_the_same_checks(tmp_path: Path) -> None:
    options = chosen([], ["collectives", "profiles"], quick=True)
    command = command_of(options, tmp_path / "out")
    request = request_of(command, Where(ips="10.0.0.1,10.0.0.2", nproc=3), tmp_path / "outcome")
    assert request.is_module
    assert (request.log_dir, request.log_flag) == (tmp_path / "out" / "log", "--record")
    assert request.hosts == ("10.0.0.1", "10.0.0.2")
    assert request.processes_per_node == 3
    words = list(request.command)
    skipped = [words[place + 1] for place, word in enumerate(words) if word == "--skip"]
    assert chosen([], skipped, "--quick" in words) == options
    assert request_of(command, Where(), tmp_path).processes_per_node == 2


def test_a_record_is_sent_to_the_address_of_the_packages_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, links = tmp_path / "r.json", Message()
    monkeypatch.setattr(record.metadata, "metadata", lambda _: links)
    assert record.how_to_send(path, 0).endswith("r.json and r.md to an issue on the project's page")
    links["Project-URL"] = "Issues, https://example.org/issues"
    sentence = record.how_to_send(path, 1)
    assert sentence.endswith("r.json and r.md, and the lines above, to an issue on https://example.org/issues")
