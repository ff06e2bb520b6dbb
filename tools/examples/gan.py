"""A GAN: a generator learns to draw points on a ring of eight clouds; it and its discriminator each have an optimizer.

Two programs are trained in turn, as Paddle's users write a GAN: one judges real and generated points, one generates
them. The result is counted: how many of the clouds the generator reaches, and the share of its points inside one.

fleet_train launch --nproc_per_node=2 tools/examples/gan.py
"""

import argparse
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn.functional import softplus

from fleet_train import fleet, role_maker

STEPS, JOINT_BATCH, NOISE, WIDTH, CLOUDS, SPREAD = 1500, 256, 8, 64, 8, 0.1
ANGLES = 2 * np.pi * np.arange(CLOUDS) / CLOUDS
CENTRES = 2 * np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1)

flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
flags.add_argument("--steps", type=int, default=STEPS)
flags.add_argument("--output_dir", default="output/gan")
args = flags.parse_args()


def network(name: str, inputs: int, outputs: int) -> Any:
    """With a fresh name guard every program that builds it uses the same parameters."""
    with paddle.utils.unique_name.guard(f"{name}_"):
        middle = nn.Linear(inputs, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        return nn.Sequential(*middle, nn.Linear(WIDTH, outputs))


def generator_and_discriminator() -> tuple[Any, Any]:
    return network("generator", NOISE, 2), network("discriminator", 2, 1)


paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))

paddle.seed(1)
judging, making, drawing, startup = (paddle.static.Program() for _ in range(4))
with paddle.static.program_guard(judging, startup):
    generate, judge = generator_and_discriminator()
    real = paddle.static.data("real", [None, 2], "float32")
    made = generate(paddle.static.data("noise", [None, NOISE], "float32")).detach()
    judging_loss = softplus(-judge(real)).mean() + softplus(judge(made)).mean()
    optimizer = paddle.optimizer.Adam(2e-3, beta1=0.5, parameters=judge.parameters())
    fleet.distributed_optimizer(optimizer).minimize(judging_loss, startup)
with paddle.static.program_guard(making, startup):
    generate, judge = generator_and_discriminator()
    making_loss = softplus(-judge(generate(paddle.static.data("noise", [None, NOISE], "float32")))).mean()
    optimizer = paddle.optimizer.Adam(2e-3, beta1=0.5, parameters=generate.parameters())
    fleet.distributed_optimizer(optimizer).minimize(making_loss, startup)
with paddle.static.program_guard(drawing, paddle.static.Program()):  # its startup program is never run
    points = generator_and_discriminator()[0](paddle.static.data("noise", [None, NOISE], "float32"))
exe = paddle.static.Executor(fleet.place())
exe.run(startup)

rank, ranks = fleet.worker_index(), fleet.worker_num()
random = np.random.default_rng(1)  # the same on all ranks; each takes its share of the joint batch
for step in range(args.steps):
    clouds = CENTRES[random.integers(CLOUDS, size=JOINT_BATCH)]
    true = (clouds + SPREAD * random.standard_normal((JOINT_BATCH, 2))).astype("float32")[rank::ranks]
    noise = random.standard_normal((2, JOINT_BATCH, NOISE), dtype="float32")[:, rank::ranks]
    exe.run(judging, feed={"real": true, "noise": noise[0]}, fetch_list=[])
    (loss_now,) = exe.run(making, feed={"noise": noise[1]}, fetch_list=[making_loss])
    if fleet.is_first_worker() and (step + 1) % 250 == 0:
        print(f"step {step + 1} making loss={loss_now.item():.4f}")

if fleet.is_first_worker():  # a program without an optimizer does not communicate: rank 0 runs it alone
    new_noise = np.random.default_rng(2).standard_normal((2000, NOISE), dtype="float32")
    (found,) = exe.run(drawing, feed={"noise": new_noise}, fetch_list=[points])
    distances = np.linalg.norm(found[:, None] - CENTRES, axis=2)
    inside = distances.min(axis=1) < 4 * SPREAD
    reached = np.bincount(distances.argmin(axis=1)[inside], minlength=CLOUDS) > 0.02 * len(found)
    print(f"{inside.mean():.3f} of the points lie in {reached.sum()} of {CLOUDS} clouds on {ranks} rank(s)")
fleet.save_persistables(exe, f"{args.output_dir}/judging", judging)
fleet.save_persistables(exe, f"{args.output_dir}/making", making)
