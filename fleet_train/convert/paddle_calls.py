"""Calls of Paddle's optimizers that scripts make on the wrapped one, and that are mapped or refused.

``paddle.static.amp.decorate`` returns an optimizer that casts a program's parameters after its startup program
(``amp_init``) and has its loss scale as a value of the program. Here a pass over the program casts where parameters are
used, so nothing is left to do, and the scale is a number.
"""

from __future__ import annotations

from typing import Any

import paddle

from fleet_train.collectives.finite import SKIP
from fleet_train.collectives.job import Job
from fleet_train.convert.passes.recompute import recomputes
from fleet_train.errors import ConversionError
from fleet_train.log import log_once
from fleet_train.profile import Profile

# Methods of Paddle's optimizers, and of those that it wraps around others.
_UPDATES_WITHOUT_MINIMIZE = ("step", "apply_optimize", "_apply_optimize", "_create_optimization_pass")


class PaddleCalls:
    """The calls that Paddle's optimizers have, for `DistributedOptimizer`."""

    amp_level: str
    """The profile's level of mixed precision: O0, O1 or O2."""
    _rank: int
    _job: Job
    _profile: Profile

    def _would_update_alone(self, method: str) -> bool:
        """Whether a method of the wrapped optimizer would update this rank's parameters without the others'."""
        return method in _UPDATES_WITHOUT_MINIMIZE and self._job.world_size > 1

    def _refuse_update_by(self, method: str, *_: Any, **__: Any) -> None:
        refuse_dynamic_mode(f"optimizer.{method}()", self._job, self._profile)
        raise ConversionError(
            f"optimizer.{method}() would update each of the {self._job.world_size} ranks alone; call "
            "optimizer.minimize(loss), or backward(loss) and apply_gradients(pairs), once, before Executor.run, which "
            "then updates in every step"
        )

    def amp_init(
        self,
        place: Any = None,
        scope: Any = None,
        test_program: Any = None,
        use_fp16_test: bool = False,
        rewrite_master_weight: bool = False,
    ) -> None:
        """Cast nothing: parameters stay float32, which is said once. ConversionError without mixed precision."""
        del place, scope, rewrite_master_weight  # Paddle's signature
        if self.amp_level == "O0":
            raise ConversionError(
                "amp_init was called, but amp_level is O0; set amp_level: O1 or O2 in the profile, or wrap an "
                "optimizer from paddle.static.amp.decorate"
            )
        text = "amp_init is mapped: parameters stay float32, so nothing is cast"
        if test_program is not None or use_fp16_test:
            text += "; the evaluation program stays float32, too"
        log_once([text], self._rank)

    def get_loss_scaling(self) -> Any:
        """Refuse the call: the scale is a number, ``fleet.loss_scale()``, not a program value."""
        raise ConversionError("get_loss_scaling: use fleet.loss_scale(), the current loss scale")

    def get_scaled_loss(self) -> Any:
        """Refuse the call: fetch the loss itself."""
        raise ConversionError("get_scaled_loss: fetch the loss itself, and multiply it by fleet.loss_scale()")


def leaves_one_process_alone(profile: Profile) -> bool:
    """Whether a job of one process is to run the program that Paddle's own optimizer makes, operator by operator."""
    plain = profile.amp_level == "O0" and profile.accumulate_steps == 1 and not recomputes(profile)
    return plain and profile.nonfinite != SKIP


def refuse_dynamic_mode(call: str, job: Job, profile: Profile) -> None:
    """Raise ConversionError in dynamic mode, unless one process is to train there as Paddle does."""
    if not paddle.in_dynamic_mode() or (job.world_size == 1 and leaves_one_process_alone(profile)):
        return
    ranks = job.world_size
    why = f"{ranks} ranks would train {ranks} models" if ranks > 1 else "the profile's settings would do nothing"
    raise ConversionError(
        f"{call} was called in dynamic mode, and fleet_train converts static programs: {why}. Call "
        "paddle.enable_static() at the top of the script, before the network is built, and optimizer.minimize(loss) in "
        "place of loss.backward() and optimizer.step(). A script that is to stay dynamic trains with "
        "paddle.DataParallel(network) and an optimizer that is not wrapped"
    )
