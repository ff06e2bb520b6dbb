"""A seeded corpus of trainings that hang or slow down: scripts as users write them, each with one fault.

What a report has to say is settled here, before anything is run. "Stands in" is followed by the file and the number of
a line of the script; a sentence with another line, or an accusation of another rank, anywhere, fails the case.

| kind | what happens | right is |
| --- | --- | --- |
| skipped | a rank leaves out a call that the others wait in | "different points"; the line where the odd rank waits |
| reordered | a rank makes two calls in the other order | the same: two ranks cannot know which of them is odd |
| twice | a rank makes a call twice | the same |
| save | `if rank == 0:` around a save | the same, of rank 0: the save |
| stopped | SIGSTOP, at any moment of the loop | the rank, "stopped by a signal", any line of the loop |
| lock | native code that keeps Python's lock | the rank, the line of the call |
| disk | reads that never end (FUSE) | the rank, the line that reads |
| network | a node does not hear the others any more | on the other nodes: that node or its ranks, and no others |
| worker | a loader's worker is dead or stopped | the rank whose worker it is, the line that waits for a batch |
| deadlock | two threads of the script wait for each other | the rank, the main thread's line |
| slow | one step exceeds the timeout by far | the rank, the line that takes long |
| crawl | steps take long, below the timeout | by `stacks`, the rank that waits least, its line; no error |
| swap | memory is dropped again and again, and read back from the disk | the rank, the line that reads the memory |
"""

from __future__ import annotations

import random
import re
import textwrap
from dataclasses import dataclass

SCRIPT_NAME = "train.py"
HERE = "# HERE"
BEGAN, READY = "began", "ready."
"""Files of the case's folder: the moment of the fault; with its number, that a rank has made its first steps."""
CROSSED = ("skipped", "reordered", "twice", "save")
"""Ranks wait at different points, which is known at once: no timeout passes."""
KINDS = (*CROSSED, "stopped", "lock", "disk", "network", "worker", "deadlock", "slow", "crawl", "swap")
CLEAN = "clean"
_READY_STEP = 5

# ODD: this is the rank and the step of the fault; AT: the step; LATE: the rank, from that step on; EVERY divides it.
_FAULTS: dict[str, tuple[str, ...]] = {
    "skipped": (
        "if step % EVERY == 0 and not (ODD):\n    fleet.barrier_worker()",
        "if step % EVERY == 0 and not (ODD):\n    total = fleet.all_reduce(np.ones(3, 'float32'))",
        "if step % EVERY == 0 and not (ODD):\n    steps = fleet.gather(step)",
    ),
    "reordered": (
        "if ODD:\n    fleet.barrier_worker()  # HERE\n    fleet.all_reduce(np.ones(2))\n"
        "elif AT:\n    fleet.all_reduce(np.ones(2))\n    fleet.barrier_worker()",
        "calls = [fleet.gather, fleet.all_reduce]\nif ODD:\n    calls.reverse()\n"
        "if AT:\n    values = [call(np.int64(step).item()) for call in calls]  # HERE",
        "if ODD:\n    fleet.gather('late')  # HERE\n    fleet.barrier_worker()\n"
        "elif AT:\n    fleet.barrier_worker()\n    fleet.gather('late')",
    ),
    "twice": (
        "if AT:\n    fleet.barrier_worker()\nif ODD:\n    fleet.barrier_worker()  # HERE",
        "for _ in range(2 if ODD else 1):\n    total = fleet.all_reduce(np.ones(3, 'float32'))  # HERE",
        "if AT:\n    fleet.gather(step)\nif ODD:\n    again = fleet.gather(step)  # HERE",
    ),
    "save": (
        "if AT and rank == 0:\n    began()\n    fleet.save_persistables(exe, 'model', main)  # HERE",
        "if AT and fleet.is_first_worker():\n    began()\n"
        "    fleet.save_persistables(executor=exe, dirname='model', main_program=main)  # HERE",
    ),
    "stopped": ("time.sleep(0.01)", "numbers = sum(range(10_000))", "np.linalg.svd(np.ones((60, 60)))"),
    "lock": (
        "if ODD:\n    re.match(r'(a+)+b', 'a' * 50)  # HERE",
        "if ODD:\n    ctypes.PyDLL(None).sleep(600)  # HERE",
        "if ODD:\n    7 ** (10**8 + step)  # HERE",
    ),
    "disk": (
        "if ODD:\n    data = open('disk/part-0.bin', 'rb').read()  # HERE",
        "if ODD:\n    data = np.memmap('disk/part-0.bin', mode='r').sum()  # HERE",
        "if ODD:\n    with open('disk/part-0.bin', 'rb') as part:\n        part.seek(4096)\n"
        "        head = part.read(16)  # HERE",
    ),
    "network": ("time.sleep(0.01)",),
    "worker": (
        "if ODD:\n    os.kill(worker.pid, signal.SIGKILL)\nnumber = numbers.get()  # HERE",
        "if ODD:\n    os.kill(worker.pid, signal.SIGSTOP)\nnumber = worker.stdout.readline()  # HERE",
        "if ODD:\n    os.kill(multiprocessing.active_children()[0].pid, signal.SIGSTOP)\nnumber = next(loaded)  # HERE",
    ),
    "deadlock": (
        "if ODD:\n    with one:\n        threading.Thread(target=writes, daemon=True).start()\n"
        "        holds.wait()\n        with other:  # HERE\n            pass",
        "if ODD:\n    with one:\n        thread = threading.Thread(target=writes, daemon=True)\n"
        "        thread.start()\n        thread.join()  # HERE",
        "if ODD:\n    pool = ThreadPoolExecutor(1)\n    nested = lambda: pool.submit(int).result()\n"
        "    pool.submit(nested).result()  # HERE",
    ),
    "slow": (
        "if ODD:\n    time.sleep(600)  # HERE",
        "if ODD:\n    sum(i * i for i in range(10**11))  # HERE",
        "if ODD:\n    np.linalg.svd(np.ones((9000, 9000)))  # HERE",
        "if ODD:\n    subprocess.run(['sleep', '600'])  # HERE",
        "if ODD:\n    socket.create_server(('127.0.0.1', 0)).accept()  # HERE",
    ),
    "crawl": (
        "if LATE:\n    time.sleep(0.2)  # HERE",
        "if LATE:\n    sum(i * i for i in range(3 * 10**6))  # HERE",
        "if LATE:\n    subprocess.run(['sleep', '0.3'])  # HERE",
    ),
    "swap": (
        "if ODD:\n    for epoch in range(1000):\n        total = sum(table[i] for i in order)  # HERE",
        "if ODD:\n    for epoch in range(10_000):\n        total = table[order].sum()  # HERE",
    ),
    "clean": ("pass", "time.sleep(0.002)", "if step % EVERY == 0:\n    fleet.barrier_worker()"),
}  # fmt: skip

_HEAD = """
import ctypes, hashlib, multiprocessing, os, re, signal, socket, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import paddle

from fleet_train import fleet

paddle.enable_static()
"""
_NEEDED = {
    "numbers.get": """
def produce(numbers):
    while True:
        numbers.put(np.random.rand(4))


numbers = multiprocessing.Queue(1)
worker = multiprocessing.Process(target=produce, args=(numbers,), daemon=True)
worker.start()
""",
    "worker.stdout": """
SOURCE = "while True: print('0' * 200_000, flush=True)"
worker = subprocess.Popen([sys.executable, "-c", SOURCE], stdout=subprocess.PIPE)
""",
    "next(loaded)": """
class Numbers(paddle.io.Dataset):
    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        return np.full(4, index, "float32")


loaded = iter(paddle.io.DataLoader(Numbers(), batch_size=4, num_workers=1, return_list=True, use_shared_memory=False))
""",
    "target=writes": """
one, other, holds = threading.Lock(), threading.Lock(), threading.Event()


def writes():
    with other:
        holds.set()
        with one:
            pass
""",
    "table[": """
table = np.memmap("table.bin", mode="r")
order = np.random.randint(0, len(table), 10**7)
""",
}

_NETWORKS = {
    """
x = paddle.static.data("x", [None, 16])
hidden = paddle.static.nn.fc(x, WIDTH, activation="relu")
""": 'random.random((8, 16), dtype="float32")',
    """
x = paddle.static.data("x", [None, 1, 8, 8])
hidden = paddle.nn.functional.relu(paddle.nn.Conv2D(1, 4, 3)(x))
hidden = paddle.static.nn.fc(paddle.flatten(hidden, 1), WIDTH)
""": 'random.random((8, 1, 8, 8), dtype="float32")',
    """
x = paddle.static.data("x", [None, 6], "int64")
hidden = paddle.nn.Embedding(50, 8)(x).mean(1)
hidden = paddle.static.nn.fc(hidden, WIDTH, activation="tanh")
""": "random.integers(0, 50, (8, 6))",
}
"""What is built, with the batches that feed it."""
_OPTIMIZERS = ("SGD(0.01)", "Momentum(0.01)", "Adam(0.001)")

_INIT = """
fleet.init(is_collective=True)
rank = fleet.worker_index()
"""
_BUILD = """
main, startup = paddle.static.Program(), paddle.static.Program()
with paddle.static.program_guard(main, startup):
NETWORK
    y = paddle.static.data("y", [None, 1])
    loss = ((paddle.static.nn.fc(hidden, 1) - y) ** 2).mean()
    optimizer = fleet.distributed_optimizer(paddle.optimizer.OPTIMIZER)
    optimizer.minimize(loss)
exe = paddle.static.Executor(fleet.place())
exe.run(startup)
random = np.random.default_rng(SEED + rank)
"""
_BATCH = """batch = {"x": BATCH, "y": random.random((8, 1), dtype="float32")}"""
_RUN = "(value,) = exe.run(main, feed=batch, fetch_list=[loss])"
_BEGAN = """
def began():
    with open("began", "w") as file:
        file.write(str(time.time()))

"""
_CLEAN_STEPS = 15
_CLEAN = """
def run(seed):
    paddle.seed(seed)
    with paddle.utils.unique_name.guard(), paddle.static.scope_guard(paddle.static.Scope()):
BODY
        names = [each.name for each in main.global_block().all_parameters()]
        values = [np.array(paddle.static.global_scope().find_var(name).get_tensor()) for name in names]
    print("run", seed, hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest(), flush=True)


for number in range(RUNS):
    run(number)
"""
_PROFILES: tuple[tuple[str, ...], ...] = (
    (),
    ("--strategy=two_communicators",),
    ("--strategy=unfused",),
    ("--strategy=bf16_compression",),
    ("--strategy=local_sgd", "--set=local_sgd_is_warm_steps=2", "--set=local_sgd_steps=4"),
)
# Where the fault is: what is defined before the loop, and what the loop does.
_PLACES = {
    "loop": ("", "{}"),
    "function": ("def prepare(step):\n    {}\n\n", "prepare(step)"),
    "method": (
        "class Preparation:\n    def at(self, step):\n        {}\n\n\npreparation = Preparation()",
        "preparation.at(step)",
    ),
    "callback": ("def on_step(step):\n    {}\n\n\nhooks = [on_step]", "for hook in hooks:\n    hook(step)"),
    "generator": ("def stages(step):\n    yield 'first'\n    {}\n\n", "for stage in stages(step):\n    pass"),
}


@dataclass(frozen=True)
class Case:
    """``flags``: of the launcher, for the profile. ``lines``: of the script; those that a report may name."""

    number: int
    kind: str
    nodes: int
    ranks_per_node: int
    rank: int
    place: str
    flags: tuple[str, ...]
    fault: str
    script: str
    lines: frozenset[int]

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node


def cases(seed: int, number: int) -> list[Case]:
    """The first ``number`` cases of a seed: all kinds in turn."""
    return [case(seed, each, KINDS[each % len(KINDS)]) for each in range(number)]


def case(seed: int, number: int, kind: str, runs: int = 0) -> Case:
    """``runs``: trainings one after the other, for a script without a fault."""
    draw = random.Random(f"{seed} {number} {kind}")
    nodes, processes = draw.choice(
        [(2, 1), (2, 2), (3, 1)] if kind == "network" else [(1, 2), (1, 3), (1, 4), (2, 1), (2, 2)]
    )
    rank = 0 if kind == "save" else draw.randrange(nodes * processes)
    fault, place = _FAULTS[kind][number // len(KINDS) % len(_FAULTS[kind])], draw.choice(list(_PLACES))
    every = draw.choice([3, 4, 5])
    step = every * draw.randint(3, 12)
    top, build, loop = _script(draw, kind, fault, place, rank, step, every)
    script = f"{top}{build}{loop}"
    if kind == CLEAN:
        build = build.replace("default_rng(", "default_rng(1000 * seed + ")
        script = top + _CLEAN.replace("BODY", _indented(build + loop, 2)).replace("RUNS", str(runs))
    marked = [number for number, line in enumerate(script.splitlines(), 1) if line.endswith(HERE)]
    if kind == "stopped":  # anywhere in the loop
        marked = list(range(f"{top}{build}".count("\n") + 1, script.count("\n") + 1))
    return Case(number, kind, nodes, processes, rank, place, draw.choice(_PROFILES), fault, script, frozenset(marked))


def _script(
    draw: random.Random, kind: str, fault: str, place: str, rank: int, step: int, every: int
) -> tuple[str, str, str]:
    """Its beginning, how the program is built, and the loop with what it calls."""
    network, batch = draw.choice(list(_NETWORKS.items()))
    build = _BUILD.replace("NETWORK", _indented(network)).replace("OPTIMIZER", draw.choice(_OPTIMIZERS))
    build = build.replace("WIDTH", str(draw.choice([8, 32, 128]))).replace("SEED", str(draw.randrange(1000)))
    body = _fault(fault, rank, step, every)
    defined, called = (_placed(each, body) for each in _PLACES[place])
    parts = [_BATCH.replace("BATCH", batch), f"{_RUN}  {HERE}" if kind == "skipped" else _RUN]
    parts.insert(draw.randint(0, 2), called)
    steps = _CLEAN_STEPS
    if kind != CLEAN:
        steps = 10**6
        parts.append(f"if step == {_READY_STEP}:\n    open(f'{READY}{{rank}}', 'w').close()")
    loop = f"for step in range({steps}):\n{_indented(chr(10).join(parts))}"
    if kind != CLEAN and draw.random() < 0.5:
        loop = f"def train():\n{_indented(loop)}\n\n\ntrain()"
    needed = [code for word, code in _NEEDED.items() if word in body]
    needed += [_BEGAN] if "began()" in body else []
    return "".join([_HEAD, *needed, _INIT]), build, f"{defined}\n{loop}\n"


def _fault(text: str, rank: int, step: int, every: int) -> str:
    """Writes down when it begins."""
    if "if ODD:\n" in text:
        text = text.replace("if ODD:\n", "if ODD:\n    began()\n", 1)
    elif re.search("ODD|LATE", text):
        text = f"if ODD:\n    began()\n{text}"
    odd, late = f"step == {step} and rank == {rank}", f"step >= {step} and rank == {rank}"
    for word, value in {"ODD": odd, "LATE": late, "AT": f"step == {step}", "EVERY": str(every)}.items():
        text = re.sub(rf"\b{word}\b", value, text)
    return text


def _placed(text: str, body: str) -> str:
    return re.sub(r"^( *)\{\}", lambda found: textwrap.indent(body, found[1]), text, flags=re.MULTILINE)


def _indented(text: str, depth: int = 1) -> str:
    return textwrap.indent(text.strip("\n"), "    " * depth)
