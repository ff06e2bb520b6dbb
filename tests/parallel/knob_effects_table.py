"""Every knob with its effect in a run of real ranks: settings, what is observed, and the expected values.

A case is also run with its knob left at the default. What is seen then must differ: a knob that nothing reads would
make the two runs equal. The numbers are small enough to be worked out by hand; parameters have 2048, 32, 256 and 8
elements (w0 .. w3) of float32; their gradients become ready in this order.
"""

from __future__ import annotations

from tests.parallel import knob_effects_sending as sending
from tests.parallel import knob_effects_training as training

_ALL = (
    *sending.DESCRIPTIONS,
    *sending.BUCKETS,
    *sending.LINK,
    *sending.CHANNELS,
    *sending.LOCAL_GROUPS,
    *sending.RUNNING,
    *training.LOCAL_SGD,
    *training.COMPRESSION,
    *training.PROGRAM,
)
CASES = {case.name: case for case in _ALL}
assert len(CASES) == len(_ALL), "two cases have one name: let their settings tell them apart"
