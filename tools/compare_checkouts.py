"""Do two checkouts train to the same bits, and is one of them slower? For changes that must not change any result.

    python tools/compare_checkouts.py --before main --after .             every profile, on 2 and on 4 ranks
    python tools/compare_checkouts.py --before main --profiles dgc,diloco --ranks 2
    python tools/compare_checkouts.py --before main --times --record docs/benchmarks/2026-11-25-before-and-after

Each checkout's own launcher starts this file as a training script that uses public names only. It trains a network of
an embedding, a convolution, batch norm and dense layers for 14 steps under each profile (periods and warm-ups
shortened, so that they happen), once with Momentum and once with Adam, a clip and smaller buckets (DGC: SGD, no clip).
It saves, starts again from what was saved and trains 6 more steps; in the second checkout it also continues from what
the first one saved. Every parameter, buffer and optimizer state of every rank is compared, bit by bit. On 4 ranks there
are two "machines", 127.0.0.2 and 127.0.0.3. The first checkout runs twice: a profile whose two runs differ is shown as
not repeatable, with the tensor. All profiles share a launch; one that fails costs another launch.
Exit code: 0 equal, 1 different, 2 a run failed. Both checkouts must run on one machine: bits depend on the processor.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
STEPS, MORE_STEPS, TIMED_STEPS = 14, 6, 60
_PORTS = itertools.cycle(range(29700, 30500, 16))
_LAUNCH_SECONDS, _END_SECONDS = 600, 60
_MARK = "COMPARE_CHECKOUTS_JOB"
_LOCAL_STEPS = {"local_sgd_is_warm_steps": 2, "local_sgd_steps": 3}
_STREAMING = {"local_sgd_steps": 6, "local_sgd_overlap_steps": 1}
# What a profile does after hundreds of steps has to happen within 14; a measured link must not decide what is sent.
SHORTENED: dict[str, dict[str, Any]] = {
    "dgc": {"dgc_rampup_begin_step": 2, "dgc_rampup_steps": 4, "dgc_min_elements": 200},
    "hierarchical": {"hierarchical_allreduce_inter_nranks": 2},
    "powersgd": {"powersgd_start_step": 2},
    "int8_compression": {"compression_declines": False},
    "int4_compression": {"compression_declines": False},
    **dict.fromkeys(("local_sgd", "local_sgd_adaptive", "diloco", "slowmo"), _LOCAL_STEPS),
    **dict.fromkeys(("streaming_diloco", "ethernet_1g"), _STREAMING),
}
TIMED = ("single_node", "multi_node", "int8_compression", "local_sgd")
FIGURES = ("step_seconds", "to_script_seconds", "to_first_step_seconds", "processes")


def train(profiles: Sequence[str], folder: Path, other: Path | None, timed: bool) -> None:
    """What one rank does: all profiles one after the other, each with a program of its own."""
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    import paddle

    from fleet_train import fleet, role_maker

    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    for profile, case in itertools.product(profiles, (0,) if timed else (0, 1)):
        with (
            paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
            paddle.utils.unique_name.guard(f"case{case}_"),
        ):
            program = _Program(profile, case)
            if timed:
                _time(program, began, folder)
            else:
                _train_and_resume(program, folder, other)
        fleet.barrier_worker()


class _Program:
    """The network in the default programs, trained under ``profile``; ``case`` 1: with Adam, a clip, small buckets."""

    def __init__(self, profile: str, case: int) -> None:
        import paddle

        from fleet_train import fleet

        self.profile, self.case, self.rank = profile, case, fleet.worker_index()
        paddle.seed(2020 + case)
        self._loss = _loss_of_network()
        fleet.distributed_optimizer(_optimizer(profile, case), _strategy(profile, case)).minimize(self._loss)
        self.executor = paddle.static.Executor(paddle.CPUPlace())
        self._main = paddle.static.default_main_program()
        self._startup = paddle.static.default_startup_program()

    def begin(self) -> None:
        """Set every value to its start."""
        self.executor.run(self._startup)

    def run(self, first: int, count: int) -> list[float]:
        """Steps ``first`` and on; the seconds of each."""
        seconds = []
        for step in range(first, first + count):
            random = np.random.default_rng([self.case, step, self.rank])
            feed = {
                "words": random.integers(0, 300, (16, 4)),
                "image": random.standard_normal((16, 1, 8, 8), dtype=np.float32),
                "label": random.integers(0, 10, 16),
            }
            start = time.perf_counter()
            self.executor.run(self._main, feed=feed, fetch_list=[self._loss])
            seconds.append(time.perf_counter() - start)
        return seconds

    def keep(self, folder: Path, part: str) -> None:
        """Write every value that outlives a step."""
        import paddle

        scope, held = paddle.static.global_scope(), dict[str, Any]()
        for variable in self._main.list_vars():
            found = scope.find_var(variable.name) if variable.persistable else None
            if found is not None and found.get_tensor()._is_initialized():
                held[variable.name] = np.asarray(found.get_tensor())
        np.savez(folder / f"{self.profile}-{self.case}-{part}-{self.rank}.npz", **held)


def _loss_of_network() -> Any:
    import paddle

    words = paddle.static.data("words", [None, 4], "int64")
    image = paddle.static.data("image", [None, 1, 8, 8], "float32")
    label = paddle.static.data("label", [None], "int64")
    seen = paddle.nn.BatchNorm2D(6)(paddle.nn.Conv2D(1, 6, 3)(image))
    seen = paddle.nn.functional.relu(seen).flatten(1)
    read = paddle.nn.Embedding(300, 16)(words).flatten(1)
    hidden = paddle.concat([seen, read], axis=1)
    for width in (96, 48):
        hidden = paddle.nn.functional.tanh(paddle.nn.Linear(hidden.shape[1], width)(hidden))
    return paddle.nn.functional.cross_entropy(paddle.nn.Linear(48, 10)(hidden), label)


def _optimizer(profile: str, case: int) -> Any:
    import paddle

    if case and profile != "dgc":  # which works without a clip, and with SGD and Momentum only
        return paddle.optimizer.Adam(0.01, grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0))
    return paddle.optimizer.SGD(0.05) if case else paddle.optimizer.Momentum(0.05, 0.9)


def _strategy(profile: str, case: int) -> Any:
    from fleet_train import DistributedStrategy

    strategy = DistributedStrategy.from_profile(profile)
    for name, value in SHORTENED.get(profile, {}).items():
        setattr(strategy, name, value)
    if case and profile != "unfused":
        strategy.fuse_parameter_groups_size = 4
    return strategy


def _time(program: _Program, began: float, folder: Path) -> None:
    program.begin()
    program.run(0, 1)
    first = time.clock_gettime(time.CLOCK_BOOTTIME)
    step = statistics.median(program.run(1, TIMED_STEPS)[10:])
    result = {"script": began, "first": first, "step": step, "processes": _processes()}
    (folder / f"{program.profile}-times-{program.rank}.json").write_text(json.dumps(result))


def _train_and_resume(program: _Program, folder: Path, other: Path | None) -> None:
    from fleet_train import fleet

    saved = f"saved-{program.profile}-{program.case}"
    program.begin()
    program.run(0, STEPS)
    program.keep(folder, "trained")
    fleet.save_persistables(program.executor, str(folder / saved))
    fleet.barrier_worker()
    program.keep(folder, "saved")
    for part, there in (("resumed", folder), ("taken_over", other)):
        if there is not None:
            program.begin()
            fleet.load_persistables(program.executor, str(there / saved))
            program.run(STEPS, MORE_STEPS)
            program.keep(folder, part)


def _processes() -> int:
    """How many processes this job consists of: those that inherited its variable."""
    mark, count = f"{_MARK}={os.environ[_MARK]}".encode(), 0
    for each in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            count += mark in each.read_bytes().split(b"\0")
    return count


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Hold the lock of the file that $COMPARE_CHECKOUTS_LOCK names, if any: other runs on this machine wait."""
    path = os.environ.get("COMPARE_CHECKOUTS_LOCK", os.devnull)
    with open(path, "ab") as file:
        if path != os.devnull:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def launch(checkout: Path, ranks: int, arguments: Sequence[str], folder: Path) -> str:
    """Train on ``ranks`` ranks with the checkout's launcher; the end of the output if that fails, else nothing."""
    port, nodes = next(_PORTS), ["127.0.0.2", "127.0.0.3"] if ranks > 2 else ["127.0.0.2"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "FLEET_TRAIN_"))}
    environ |= {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", _MARK: str(port)}
    launchers = []
    script = [str(Path(__file__).resolve()), "rank", str(folder), *arguments]
    for node in nodes:
        flags = [f"--node_ip={node}", f"--nproc_per_node={ranks // len(nodes)}", f"--started_port={port}"]
        flags += [f"--cluster_node_ips={','.join(nodes)}", f"--log_dir={folder / f'log{node}'}"]
        command = [sys.executable, "-m", "fleet_train", "launch", *flags, *script]
        with (folder / f"output{node}").open("wb") as output:
            launchers.append(subprocess.Popen(command, env=environ, cwd=folder, stdout=output, stderr=output))
    failed = ""
    for node, launcher in zip(nodes, launchers, strict=True):
        try:
            code = launcher.wait(_LAUNCH_SECONDS)
        except subprocess.TimeoutExpired:
            launcher.terminate()  # it ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(_END_SECONDS)
            launcher.kill()
            code = launcher.wait()
        if code:
            said = (folder / f"output{node}").read_text(errors="replace").strip()
            said = said.replace(str(folder), "FOLDER").replace(str(checkout), "CHECKOUT").replace("\n", " / ")
            failed = failed or f"exit code {code}: {said[-600:]}"
    return failed


def run_all(checkout: Path, ranks: int, profiles: Sequence[str], folder: Path, other: Path | None) -> dict[str, str]:
    """Train all profiles in as few launches as possible; for each that failed, why. A failure costs another launch."""
    failed, left = dict[str, str](), list(profiles)
    folder.mkdir()
    while left:
        with _turn():
            failure = launch(checkout, ranks, [",".join(left), str(other or "")], folder)
        done = [name for name in left if _arrays(folder, name, "resumed", 1, ranks)]
        left = [name for name in left if name not in done]
        if left:
            failed[left.pop(0)] = failure or "no result"
        if done and not left:
            break
    return failed


def _arrays(folder: Path, profile: str, part: str, case: int, ranks: int) -> list[Path]:
    """One file per rank, or an empty list if any is missing."""
    paths = [folder / f"{profile}-{case}-{part}-{rank}.npz" for rank in range(ranks)]
    return paths if all(path.is_file() for path in paths) else []


def differences(one: Path, other: Path, profile: str, ranks: int) -> Iterator[str]:
    """Each tensor of which the two folders hold other bits, in the order in which they arose."""
    for case, part in itertools.product((0, 1), ("trained", "saved", "resumed", "taken_over")):
        expected = "resumed" if part == "taken_over" and not _arrays(one, profile, part, case, ranks) else part
        pairs = zip(
            _arrays(one, profile, expected, case, ranks), _arrays(other, profile, part, case, ranks), strict=False
        )
        for rank, (left, right) in enumerate(pairs):
            with np.load(left) as first, np.load(right) as second:
                for name in sorted({*first.files, *second.files}):
                    where = f"{name} ({'Adam' if case else 'Momentum'}, {part}, rank {rank})"
                    if name not in first.files or name not in second.files:
                        yield f"{where}: only in one"
                    elif first[name].tobytes() != second[name].tobytes():
                        yield f"{where}: {_largest(first[name], second[name])}"


def _largest(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> str:
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"{one.dtype} {one.shape}, {other.dtype} {other.shape}"
    return f"differs by up to {np.nanmax(np.abs(one.astype(np.float64) - other.astype(np.float64))):.3g}"


def compare(checkouts: Mapping[str, Path], all_ranks: Sequence[int], profiles: Sequence[str]) -> list[dict[str, Any]]:
    """One row per number of ranks and profile: ``result`` is equal, different, not repeatable or failed."""
    rows: list[dict[str, Any]] = []
    for ranks in all_ranks:
        with tempfile.TemporaryDirectory(prefix="compare-checkouts-") as name:
            before, again, after = (Path(name) / each for each in ("before", "again", "after"))
            failed = {each: run_all(checkouts["before"], ranks, profiles, each, None) for each in (before, again)}
            failed[after] = run_all(checkouts["after"], ranks, profiles, after, before)
            for profile in profiles:
                row: dict[str, Any] = {"profile": profile, "ranks": ranks}
                noise = list(differences(before, again, profile, ranks))
                found = list(differences(before, after, profile, ranks))
                reasons = [f"{where.name}: {failed[where][profile]}" for where in failed if profile in failed[where]]
                if reasons:
                    row |= {"result": "failed", "first": reasons[0]}
                elif noise:
                    row |= {"result": "not repeatable", "first": f"two runs of before: {noise[0]}"}
                else:
                    row |= {"result": "different" if found else "equal", "first": found[0] if found else ""}
                rows.append(row)
                print(f"{profile:20} {ranks} ranks  {row['result']:15} {row['first']}", flush=True)
    return rows


def measure(checkouts: Mapping[str, Path], all_ranks: Sequence[int], profiles: Sequence[str], rounds: int) -> list[Any]:
    """One row per number of ranks and profile: medians of both checkouts, and of the ratios within a round."""
    rows = []
    for ranks, profile in itertools.product(all_ranks, profiles):
        turns: list[dict[str, dict[str, float]]] = []
        for turn in range(rounds + 1):
            order = list(checkouts) if turn % 2 else list(checkouts)[::-1]
            turns.append({who: _timed(checkouts[who], ranks, profile) for who in order})
        turns = turns[1:]  # the first one compiles Python's files and fills the page cache
        row: dict[str, Any] = {"profile": profile, "ranks": ranks}
        for what in FIGURES:
            both = {who: statistics.median(turn[who][what] for turn in turns) for who in checkouts}
            ratio = statistics.median(turn["after"][what] / turn["before"][what] for turn in turns)
            row[what] = {who: round(value, 5) for who, value in both.items()} | {"ratio": round(ratio, 3)}
        print(profile, ranks, "ranks:", json.dumps({name: row[name] for name in FIGURES}), flush=True)
        rows.append(row | {"rounds": turns})
    return rows


def _timed(checkout: Path, ranks: int, profile: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="compare-checkouts-") as name, _turn():
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        if failure := launch(checkout, ranks, [profile, "", "timed"], Path(name)):
            raise SystemExit(f"{profile} on {ranks} ranks: {failure}")
        each = [json.loads(Path(name, f"{profile}-times-{rank}.json").read_text()) for rank in range(ranks)]
    return {
        "step_seconds": max(one["step"] for one in each),
        "to_script_seconds": max(one["script"] for one in each) - began,
        "to_first_step_seconds": max(one["first"] for one in each) - began,
        "processes": max(one["processes"] for one in each) / ranks,
    }


def write_record(path: Path, revisions: Mapping[str, str], rows: Sequence[Mapping[str, Any]], times: bool) -> None:
    """Write ``path``.json and ``path``.md. No path of this machine: checkouts are named by their commits."""
    sys.path.insert(0, str(ROOT))
    from tools.benchmarks.record import beside, circumstances

    at = circumstances() | dict(revisions)
    words = ["--before", revisions["before"].split()[0], "--after", revisions["after"].split()[0]]
    words += ["--profiles", ",".join(dict.fromkeys(row["profile"] for row in rows))]
    words += ["--ranks", *(str(ranks) for ranks in dict.fromkeys(row["ranks"] for row in rows))]
    words += ["--times", "--rounds", str(len(rows[0]["rounds"]))] if times else []
    at["command"] = shlex.join(["python", "tools/compare_checkouts.py", *words])
    beside(path, ".json").write_text(json.dumps(at | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
    lines = [f"# {'Times' if times else 'Bits'} of two checkouts, {at['date'][:10]}", ""]
    lines += [f"- Before: commit {revisions['before']}; after: commit {revisions['after']}."]
    lines += [
        f"- Machine: {at['processor']}, {at['processors']} processors, load {at['load_average_before'][0]} at the end."
    ]
    lines += [f"- Command: `{at['command']}`", ""]
    if times:
        lines += [
            "| profile | ranks | what | before | after | after / before, median |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for row in rows:
            for what in FIGURES:
                figures = " | ".join(str(row[what][each]) for each in ("before", "after", "ratio"))
                lines.append(f"| {row['profile']} | {row['ranks']} | {what.replace('_', ' ')} | {figures} |")
    else:
        lines += ["| profile | ranks | parameters and state | first difference |", "| --- | --- | --- | --- |"]
        lines += [f"| {row['profile']} | {row['ranks']} | {row['result']} | {row['first']} |" for row in rows]
    beside(path, ".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


@contextlib.contextmanager
def checkout_of(folder_or_revision: str) -> Iterator[Path]:
    """The folder, or a work tree of the revision that is removed at the end."""
    if Path(folder_or_revision).is_dir():
        yield Path(folder_or_revision).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="compare-checkouts-") as name:
        git, folder = ["git", "-C", str(ROOT), "worktree"], Path(name, "checkout")
        subprocess.run([*git, "add", "--detach", "--quiet", str(folder), folder_or_revision], check=True)
        try:
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def _revision(checkout: Path) -> str:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", checkout, *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    return git("rev-parse", "--short=10", "HEAD") + (" with changes" if git("status", "--porcelain") else "")


def main() -> int:
    if sys.argv[1:2] == ["rank"]:
        folder, names, other, *timed = sys.argv[2:]
        train(names.split(","), Path(folder), Path(other) if other else None, bool(timed))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, metavar="DIR_OR_REV", help="A checkout, or a commit, branch or tag.")
    parser.add_argument("--after", default=str(ROOT), metavar="DIR_OR_REV", help="The same; by default this checkout.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="Numbers of ranks; default: 2 4.")
    parser.add_argument("--profiles", help="Names, separated by commas; default: all that both checkouts ship.")
    parser.add_argument("--times", action="store_true", help="Measure times and processes instead; see --rounds.")
    parser.add_argument(
        "--rounds", type=int, default=5, help="With --times: launches of each, alternating; default: 5."
    )
    parser.add_argument("--record", type=Path, metavar="PATH", help="Write PATH.json and PATH.md.")
    options = parser.parse_args()
    with checkout_of(options.before) as before, checkout_of(options.after) as after:
        checkouts = {"before": before, "after": after}
        shipped = [{path.stem for path in each.glob("strategies/*.yaml")} for each in checkouts.values()]
        profiles = sorted(shipped[0] & shipped[1]) if not options.times else list(TIMED)
        profiles = options.profiles.split(",") if options.profiles else profiles
        if options.times:
            rows = measure(checkouts, options.ranks, profiles, options.rounds)
        else:
            rows = compare(checkouts, options.ranks, profiles)
        if options.record:
            write_record(options.record, {who: _revision(each) for who, each in checkouts.items()}, rows, options.times)
    results = {row.get("result") for row in rows}
    return 2 if "failed" in results else 1 if "different" in results else 0


if __name__ == "__main__":
    sys.exit(main())
