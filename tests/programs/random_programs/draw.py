"""A case from a seed: what the program is made of, and the profile with which ranks train it.

A seed means the same case for ever, so long as nobody changes a list that is drawn from.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import paddle

from tests.programs.catalogue import Program
from tests.programs.random_programs import images, optimizers, sequences, vectors
from tests.programs.random_programs.blocks import BLOCKS, VECTOR, Builder
from tests.programs.random_programs.losses import LOSSES
from tests.programs.script import Script

SAMPLES = 72
"""Of a joint batch: 2, 3 and 4 ranks have equal shares, and 2 or 3 micro-batches."""
UPDATES = 4
GOES_BACK_AT = 2
LATE = 1000
LEADS_TO = vectors.LEADS_TO | sequences.LEADS_TO | images.LEADS_TO
MOST_BLOCKS = 7


@dataclass(frozen=True)
class Case:
    """One program and its strategy; JSON in full, so that processes get it from the one that drew it."""

    seed: int
    ranks: int
    nodes: int
    dtype: str
    blocks: tuple[str, ...]
    loss: str
    optimizer: str
    schedule: str = ""
    clip: str = ""
    decay: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    goes_back: bool = False
    """Whether ranks save in the middle, make an update that is not meant, and load."""

    @property
    def name(self) -> str:
        return f"seed {self.seed}"

    @property
    def needs(self) -> set[str]:
        return {need for name in self.blocks for need in BLOCKS[name].needs}

    @property
    def in_low_precision(self) -> bool:
        return self.settings.get("amp_level", "O0") != "O0"

    @property
    def keeps_own_state(self) -> bool:
        """Whether the optimizer's state is another one than that of one process, on purpose."""
        warm = self.settings.get("local_sgd_is_warm_steps", 0) >= LATE
        return bool(self.settings.get("use_local_sgd", False)) and not warm

    def __str__(self) -> str:
        trained = [self.optimizer, *(part for part in (self.schedule, self.clip, self.decay) if part)]
        return (
            f"{self.name}, {self.ranks} ranks on {self.nodes} nodes, {self.dtype}: {' > '.join(self.blocks)} > "
            f"{self.loss}; {', '.join(trained)}{', saved and loaded' if self.goes_back else ''}; {self.settings}"
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        entries = json.loads(text)
        return cls(**{**entries, "blocks": tuple(entries["blocks"])})


def draw(seed: int, ranks: int, nodes: int = 0) -> Case:
    """The case of a seed; ``nodes=0`` draws their number, too.

    Imports fleet_train's profiles, which say what goes together.
    """
    random = np.random.default_rng([seed, 0])
    blocks = _blocks(random)
    low = bool(random.random() < 0.1)
    optimizer = _pick(random, ["sgd", "momentum"] if low else [*optimizers.OPTIMIZERS])
    schedule = _pick(random, [*optimizers.SCHEDULES]) if random.random() < 0.5 else ""
    clip = _pick(random, [*optimizers.CLIPS]) if random.random() < 0.5 else ""
    in_float32 = low or clip in optimizers.FLOAT32_CLIPS or random.random() < 0.6
    case = Case(
        seed=seed,
        ranks=ranks,
        nodes=nodes or _pick(random, [number for number in (1, 2, ranks) if number <= ranks]),
        dtype="float32" if in_float32 else "float64",
        blocks=blocks,
        loss=_pick(random, [*LOSSES]),
        optimizer=optimizer,
        schedule="" if optimizer in optimizers.WITHOUT_SCHEDULE else schedule,
        clip=clip,
        decay=_pick(random, [*optimizers.DECAYS]) if random.random() < 0.4 else "",
    )
    from tests.programs.random_programs.profiles import settings_of

    case = replace(case, settings=settings_of(case, random, low))
    return replace(case, goes_back=bool(random.random() < 0.3))


def _blocks(random: np.random.Generator) -> tuple[str, ...]:
    """Blocks, each of the kind that the one before leads to; the last one leads to a vector."""
    chosen: list[str] = []
    kind, number = VECTOR, int(random.integers(2, MOST_BLOCKS))
    while len(chosen) < number or kind != VECTOR:
        own = [name for name, one in BLOCKS.items() if one.kind == kind]
        if len(chosen) >= number:
            own = [name for name in own if LEADS_TO.get(name) == VECTOR]
        elif kind == VECTOR and random.random() < 0.35:
            own = [name for name in own if name in LEADS_TO]
        chosen.append(_pick(random, own))
        kind = LEADS_TO.get(chosen[-1], kind)
    return tuple(chosen)


def _pick(random: np.random.Generator, choices: list[Any]) -> Any:
    return choices[int(random.integers(len(choices)))]


def program_of(case: Case) -> Program:
    """What runs in one process and on ranks."""

    def run(script: Script) -> None:
        paddle.set_default_dtype(case.dtype)
        with_bias = case.optimizer not in optimizers.WITHOUT_BIAS and case.decay != "l1"  # by the sign of what is zero
        g = Builder(script, case.seed, case.dtype, with_bias)
        h = g.floats(g.pick(4, 6))
        for name in case.blocks:
            h = BLOCKS[name].build(g, h)
        loss = LOSSES[case.loss](g, h)
        optimizer, schedule = optimizers.make(case.optimizer, case.schedule, case.clip, case.decay)
        script.minimize(optimizer, loss)
        script.train(loss, UPDATES, schedule, SAMPLES)

    return Program(case.name, "random", str(case), run, sums="named" in case.needs)
