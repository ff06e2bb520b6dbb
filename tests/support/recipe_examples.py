"""The smallest complete addition for each recipe of CONTRIBUTING.md: what goes into which file.

`tests/unit/test_contributing.py` writes them into a copy of the checkout. Each is real: the tests that the recipe names
pass with it, the ones on several ranks included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Insertion:
    """``text`` in front of the first ``before``, or behind the first ``behind``; a new file where both are empty."""

    text: str
    before: str = ""
    behind: str = ""

    def into(self, path: Path) -> None:
        """Raises ValueError where the place is not there."""
        if not self.before and not self.behind:
            path.write_text(self.text, encoding="utf-8")
            return
        old, mark = path.read_text(encoding="utf-8"), self.before or self.behind
        if mark not in old:
            raise ValueError(f"{path}: the example of the recipe looks for {mark!r}, which is not there any more")
        head, _, tail = old.partition(mark)
        new = self.text + mark if self.before else mark + self.text
        path.write_text(head + new + tail, encoding="utf-8")


@dataclass(frozen=True)
class Example:
    """``name`` stands for NAME. ``written``: by a command of the recipe."""

    name: str
    files: dict[str, tuple[Insertion, ...]]
    written: dict[str, str] = field(default_factory=dict)


_EXPORT = "python -m fleet_train.profile.export"
_OPTIONS = "python -m tests.unit.cli.command_options"

KNOB = Example(
    "last_gradient_alone",
    {
        "fleet_train/profile/communication_knobs.py": (
            Insertion(
                """    last_gradient_alone: bool = knob(
        False,
        fate="carried out",
        needs="fuse_all_reduce_ops",
        meaning="Give the gradient that is ready last a bucket of its own.",
        reason="The plan cuts the last bucket in front of its last gradient.",
    )
""",
                before="    link_gigabits: float = knob(",
            ),
        ),
        "fleet_train/plan/build.py": (
            Insertion(
                """    if profile.last_gradient_alone:
        groups = [*groups[:-1], *(part for part in (groups[-1][:-1], groups[-1][-1:]) if part)]
""",
                before="    buckets = tuple(\n",
            ),
        ),
        "tests/parallel/test_knob_effects.py": (
            Insertion(
                '\n    case("last_gradient_alone", True, sent=[["all_reduce 9344", "all_reduce 32"]] * 2),',
                behind="\n    # Buckets.",
            ),
        ),
        "fleet_train/plan/explain.py": (
            Insertion(
                """    if profile.last_gradient_alone:
        notes.append(Note("last_gradient_alone", "the last gradient is a bucket by itself"))
""",
                before="    return notes\n",
            ),
        ),
    },
    {"strategies/schema.json": _EXPORT, "docs/knobs.md": _EXPORT},
)

PROFILE = Example(
    "int8_hierarchical",
    {
        "strategies/int8_hierarchical.yaml": (
            Insertion(
                """# yaml-language-server: $schema=./schema.json
#
# Several machines with several ranks each, on a slow network.
# Why:    whole gradients inside each machine, whole numbers of 8 bits between the machines.
# Costs:  approximate gradients with error feedback, and three exchanges in a row for each bucket.
# Use:    on each machine, with its own address as node_ip:
#         python -m fleet_train launch --cluster_node_ips=192.168.1.2,192.168.1.3 --node_ip=192.168.1.2
#           --nproc_per_node=2 --strategy int8_hierarchical train.py

description: Several machines with several ranks each; the machines' leaders send gradients in 8 bits.
extends: int8_compression
use_hierarchical_allreduce: true
"""
            ),
        ),
        "strategies/measured.json": (
            Insertion(
                ' "int8_hierarchical": [\n  "not measured: an example of how a profile is added"\n ],\n',
                before=' "local_sgd": [\n',
            ),
        ),
        "tests/unit/profile/test_profile_catalogue.py": (
            Insertion('    "int8_hierarchical",\n', before='    "local_sgd",\n'),
            Insertion(
                '    "int8_hierarchical": FEW_FETCHES | {"compression": "int8", "use_hierarchical_allreduce": True},\n',
                behind='    "int8_compression": FEW_FETCHES | {"compression": "int8"},\n',
            ),
        ),
        "docs/strategies.md": (
            Insertion("| `int8_hierarchical` | several ranks each | no |\n", before="| `ethernet_1g` | several"),
        ),
    },
)

COMPRESSION = Example(
    "bf16_gather",
    {
        "fleet_train/profile/methods/bf16_gather.py": (
            Insertion(
                '''"""Every rank's gradients in bfloat16 to every rank, which sums them in float32."""

from __future__ import annotations

from typing import Any

from fleet_train.profile.methods.base import Bucket, CollectiveSpec
from fleet_train.profile.methods.base import BF16, IN_16_BITS, Dense


class Gathered(Dense):
    """One all-gather; with local groups, the leaders sum as bf16 does."""

    def sent(
        self, bucket: Bucket, profile: Any, hierarchical: bool, step: int | None = None
    ) -> tuple[CollectiveSpec, ...]:
        if hierarchical:
            return super().sent(bucket, profile, hierarchical, step)
        return (CollectiveSpec("allgather", 2 * bucket.elements, 2),)

    def on_ranks(self, parts: Any) -> Any:
        """The sum is rounded in float32 alone, in the order of ranks on all of them."""
        if parts.plan.group_size:
            return super().on_ranks(parts)

        def average(gradients: Any) -> Any:
            narrow = parts.cast(parts.flatten(gradients), "bfloat16")
            yield parts.hand_over
            gathered = yield from parts.all_gather(narrow)
            total = parts.cast(gathered, "float32").sum(0)
            return parts.split(total.scale_(1.0 / parts.plan.world_size))

        return parts.stateless(average)

    def in_numpy(self, parts: Any) -> Any:
        return super().in_numpy(parts) if parts.plan.group_size else _Reference(parts)


class _Reference:
    def __init__(self, parts: Any) -> None:
        self._parts = parts

    def step(self, gradients: Any) -> list[Any]:
        import numpy as np

        bits = [flat.astype(np.float32).view(np.uint32) for flat in self._parts.joined(gradients)]
        rounded = [((own + 0x7FFF + (own >> 16 & 1)) & 0xFFFF0000).view(np.float32) for own in bits]
        mean = np.sum(rounded, axis=0, dtype=np.float32) * np.float32(1.0 / len(rounded))
        return list(self._parts.split(mean))


BF16_GATHER = Gathered(
    "bf16_gather",
    BF16.words,
    family=IN_16_BITS,
    wire_dtype="bfloat16",
    ranks_in=BF16.ranks_in,
    numpy_in=BF16.numpy_in,
)
'''
            ),
        ),
        "fleet_train/profile/methods/__init__.py": (
            Insertion(
                "from fleet_train.profile.methods.bf16_gather import BF16_GATHER\n",
                before="from fleet_train.profile.methods.base import",
            ),
            Insertion("BF16_GATHER, ", before="FP16, INT8"),
        ),
        "tests/parallel/test_knob_effects.py": (
            Insertion(
                """    case(
        "compression", "bf16_gather", sent=[["all_gather 4688 bfloat16"]] * 2, moved=[1.5, 1.5], counted=9376
    ),
""",
                before='    case("compression", "fp16"',
            ),
        ),
        "tests/unit/profile/test_profile_catalogue.py": (
            Insertion('"bf16_gather", ', before='"fp16", "int8", "int4", "powersgd"'),
        ),
    },
    {"strategies/schema.json": _EXPORT, "docs/knobs.md": _EXPORT},
)

ENGINE = Example(
    "flux",
    {
        "fleet_train/cluster/flux.py": (
            Insertion(
                '''"""Flux: a task of ``flux run``. Variables: flux-framework.readthedocs.io, flux-environment(7)."""

from __future__ import annotations

from collections.abc import Mapping

from fleet_train.cluster.started import Started, Variables


def read(environ: Mapping[str, str]) -> Started | None:
    if not {"FLUX_TASK_RANK", "FLUX_JOB_SIZE"} <= environ.keys():
        return None
    of = Variables(environ, "Flux")
    return of.started("FLUX_TASK_RANK", "FLUX_JOB_SIZE", local_index=of.needed("FLUX_TASK_LOCAL_ID"), job="flux")
'''
            ),
        ),
        "fleet_train/cluster/engines.py": (
            Insertion("flux, ", before="kubernetes, mpi"),
            Insertion('    ("flux", flux.read),\n', before='    ("torchrun", read_torchrun),'),
        ),
        "tests/unit/cluster/test_engines.py": (
            Insertion(
                'FLUX = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "0"}\n',
                before="RECOGNISED: ",
            ),
            Insertion('    (FLUX, ("Flux", 1, 2, 0, None)),\n', before="    (OPEN_MPI, ("),
        ),
        "docs/engines.md": (
            Insertion(
                "| Flux | the variables of the task | `flux run -n 16 python train.py` | not tried |\n",
                before="| Open MPI 4 and 5 |",
            ),
            Insertion("`flux`, ", before="`torchrun`, `kubernetes`) insists"),
        ),
    },
    {"tests/unit/cli/options.json": _OPTIONS},
)

MODEL = Example(
    "linear",
    {
        "fleet_train/train/settings.py": (Insertion('"linear", ', before="*VISION_MODELS)"),),
        "tests/unit/train/test_models.py": (Insertion('"linear", ', before='"ResNet18", "MobileNetV1"'),),
        "fleet_train/train/programs.py": (
            Insertion(
                '''def linear(sample_shape: Shape, num_classes: int) -> Any:
    """Logistic regression: [batch, *sample_shape] -> logits [batch, num_classes]."""
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(sample_shape)), num_classes))


''',
                before="def cnn(",
            ),
            Insertion('"linear": linear, ', before='"mlp": mlp,'),
        ),
    },
    {"tests/unit/cli/options.json": _OPTIONS},
)

EXAMPLES = {
    "A knob of the profile": KNOB,
    "A strategy: a profile of the catalogue": PROFILE,
    "A strategy: a compression of gradients": COMPRESSION,
    "An engine that starts jobs": ENGINE,
    "A model of the reference trainer": MODEL,
}
"""By the recipe's heading."""
