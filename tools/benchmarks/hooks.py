"""PyTorch's communication hooks, by their names on the command line. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

DDP, BF16, POWERSGD, POST_LOCAL_SGD = "ddp", "bf16", "powersgd", "post_local_sgd"
_FORM = re.compile(
    r"(?:(?P<plain>ddp|bf16)(?:_(?P<bucket>[1-9][0-9]*)mb)?"
    r"|(?P<starting>powersgd|post_local_sgd)_(?P<number>[1-9][0-9]*)(?:_from_(?P<start>[0-9]+))?)"
)


@dataclass(frozen=True)
class Hook:
    """``ddp`` as it comes has buckets of 25 MiB after a first one of 1 MiB; ``number`` is PowerSGD's rank or the
    period of post-local SGD; ``start`` how many plain steps are before it.
    """

    kind: str
    bucket_mb: int | None = None
    number: int = 1
    start: int = 0

    @staticmethod
    def of(variant: str, start: int) -> Hook:
        """The hook of a contestant's variant; ``start`` if it names none. Raises ValueError with what is accepted."""
        found = _FORM.fullmatch(variant)
        if found is None:
            raise ValueError(
                "PyTorch takes part as ddp, ddp_4mb, bf16, bf16_4mb, powersgd_1, post_local_sgd_8, the last two also "
                "with their first step, such as post_local_sgd_8_from_100"
            )
        if found["plain"]:
            return Hook(found["plain"], int(found["bucket"]) if found["bucket"] else None)
        return Hook(found["starting"], None, int(found["number"]), int(found["start"]) if found["start"] else start)

    @property
    def family(self) -> str:
        """The kind, regardless of buckets and start: ``ddp``, ``bf16``, ``powersgd_1``, ``post_local_sgd_8``."""
        return f"{self.kind}_{self.number}" if self.kind in (POWERSGD, POST_LOCAL_SGD) else self.kind

    def rhythm(self) -> dict[str, int]:
        """Warm-up steps, and the period with which steps repeat after them, as for our profiles."""
        return {"settles_after": self.start, "period_steps": self.number if self.kind == POST_LOCAL_SGD else 1}
