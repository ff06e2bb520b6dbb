"""Calls of Paddle's mixed-precision optimizer that scripts make after ``minimize``."""

from __future__ import annotations

from typing import Any

from fleet_train.convert.settings.apply_profile import say
from fleet_train.errors import ConversionError


class AmpCalls:
    """For a ``DistributedOptimizer``, whose own pass lowers the precision."""

    amp_level: str
    _rank: int

    def amp_init(
        self,
        place: Any = None,
        scope: Any = None,
        test_program: Any = None,
        use_fp16_test: bool = False,
        rewrite_master_weight: bool = False,
    ) -> None:
        """Casts nothing: parameters stay float32, which is said once. ConversionError without mixed precision."""
        del place, scope, rewrite_master_weight  # Paddle's signature
        if self.amp_level == "O0":
            raise ConversionError(
                "amp_init was called, but amp_level is O0; set amp_level: O1 or O2 in the profile, or wrap an "
                "optimizer from paddle.static.amp.decorate"
            )
        text = "amp_init is mapped: parameters stay float32, so nothing is cast"
        if test_program is not None or use_fp16_test:
            text += "; the evaluation program stays float32, too"
        say([text], self._rank)

    def get_loss_scaling(self) -> Any:
        """Refused: the scale is a number, ``fleet.loss_scale()``, not a program value."""
        raise ConversionError("get_loss_scaling: use fleet.loss_scale(), the current loss scale")

    def get_scaled_loss(self) -> Any:
        """Refused: fetch the loss itself."""
        raise ConversionError("get_scaled_loss: fetch the loss itself, and multiply it by fleet.loss_scale()")
