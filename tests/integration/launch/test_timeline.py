"""A job that is traced: ``launch --trace`` leaves recordings of all ranks, ``timeline`` says who made a step long."""

from __future__ import annotations

import json

from fleet_train.cluster.flight.trace import trace_name
from tests.integration.launch.conftest import Bench
from tests.support.processes import output_of, python

SCRIPT = """
import time
import numpy, paddle
import fleet_train.fleet as fleet
from fleet_train import role_maker

paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
main, startup = paddle.static.Program(), paddle.static.Program()
with paddle.static.program_guard(main, startup):
    x = paddle.static.data("x", [8, 64], "float32")
    loss = paddle.mean(paddle.static.nn.fc(paddle.static.nn.fc(x, 64), 1))
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.01)).minimize(loss)
paddle.seed(1)
exe = paddle.static.Executor(fleet.place())
exe.run(startup)
for step in range(10):
    if fleet.worker_index() == 1:
        time.sleep(0.2)
    feed = {"x": numpy.full((8, 64), fleet.worker_index() + step, "float32")}
    (value,) = exe.run(main, feed=feed, fetch_list=[loss])
print("loss", value.tobytes().hex(), flush=True)
"""
TWO_BUCKETS = ["--set", "fuse_grad_size_in_MB=0.01", "--set", "last_comm_group_size_MB=0.01"]
TRACKS = {"program", "copies and waits", "communicator 0"}


def test_a_traced_job_has_a_timeline_whose_first_reason_is_the_slow_rank(bench: Bench) -> None:
    losses = []
    for job, flags in (("plain", []), ("traced", ["--trace", "5-8"])):
        bench.start(SCRIPT, flags=["--nproc_per_node=2", "--log_dir", job, *TWO_BUCKETS, *flags], job=job)
        ended = bench.ended(120.0)
        assert ended[-1].exit_code == 0, ended[-1].output
        losses.append(bench.log(f"node0/{job}/workerlog.0").rpartition("loss ")[2])
    assert losses[0] == losses[1] != ""

    folder = bench.folder / "node0" / "traced"
    assert sorted(path.name for path in folder.glob("trace.*")) == [trace_name(rank) for rank in (0, 1)]
    found = json.loads(output_of(python("-m", "fleet_train", "timeline", str(folder), "--json")))
    assert found["steps"] == [5, 6, 7, 8]
    first = found["reasons"][0]
    assert (first["kind"], first["rank"]) == ("script", 1), first
    assert 190 < first["ms"] < found["step_ms"] < 600
    assert all(0 < error < 0.05 for *_, error in found["clocks"])

    assert (folder / "timeline.png").read_bytes()[1:4] == b"PNG"
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    for rank in (0, 1):
        names = {event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == rank}
        assert names >= TRACKS
        shown = {event["name"] for event in events if event["ph"] == "X" and event["pid"] == rank}
        of_buckets = {f"{kind} bucket {index}" for kind in ("copy", "code", "wire", "wait") for index in (0, 1)}
        assert shown >= {"forward", "backward", "update", "barrier", *of_buckets}
    began = {  # the clocks are one: no rank is done with a collective before the other has come to it
        (event["pid"], event["name"]): (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["ph"] == "X" and event["cat"] == "wire"
    }
    assert began[0, "wire bucket 0"][1] > began[1, "wire bucket 0"][0]


TRAIN = """
from fleet_train.train.config import TrainConfig
from fleet_train.train.reference import run

run(TrainConfig(model="mlp", epochs=1, trace="6-8", output_dir="run"))
"""


def test_the_trainer_shows_one_traced_step_of_all_ranks(bench: Bench) -> None:
    bench.start(TRAIN, flags=["--nproc_per_node=2"])
    [ended] = bench.ended(120.0)
    assert ended.exit_code == 0, ended.output
    assert "traced steps 6-8: fleet_train timeline" in ended.output
    run = bench.folder / "node0" / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    [shown] = [record for record in records if record.get("tag") == "timeline/step"]
    assert (shown["step"], shown["file"]) == (8, "images/timeline_step.png")
    assert (run / shown["file"]).exists()
    assert b"timeline/step" in (run / "visualdl" / "vdlrecords.train.log").read_bytes()
