"""Unreadable images: each is replaced by the next readable one and counted; too many are an error."""

from __future__ import annotations

import logging
import math

from fleet_train.errors import DataError, printable

_NAMES_SHOWN = 10
_log = logging.getLogger(__name__)


class CorruptImages:
    """The unreadable files that this rank has found so far.

    Args:
        num_samples: of the dataset.
        max_corrupt: how many may be unreadable; a share of the dataset below 1, otherwise a number. 0 = none.
    """

    def __init__(self, num_samples: int, max_corrupt: float, where: str) -> None:
        if max_corrupt < 0 or (max_corrupt >= 1 and math.isfinite(max_corrupt) and max_corrupt != int(max_corrupt)):
            raise DataError(
                f"--max_corrupt {max_corrupt:g}: give a share of the images (0.01 = 1 of 100) or a whole number"
            )
        self._num_samples = num_samples
        self._where = where
        allowed = max_corrupt if max_corrupt >= 1 else max_corrupt * num_samples
        self.allowed = int(min(allowed, num_samples - 1))  # at least one must remain as a replacement
        self._reasons: dict[int, tuple[str, str]] = {}

    def __len__(self) -> int:
        return len(self._reasons)

    @property
    def names(self) -> list[str]:
        """The unreadable files, in the order of the dataset."""
        return [self._reasons[index][0] for index in sorted(self._reasons)]

    def replacement(self, index: int, name: str, reason: str) -> int:
        """Count the file and return the sample that replaces it: the next one of the dataset, the same on every
        rank."""
        self._reasons[index] = (name, reason)
        if len(self._reasons) <= _NAMES_SHOWN:
            _log.warning("cannot read %s (%s); another image replaces it", printable(name), printable(reason))
        if len(self._reasons) > self.allowed:
            raise DataError(self._message())
        return self.skip((index + 1) % self._num_samples)

    def skip(self, index: int) -> int:
        """The first sample from this one on that is not known to be unreadable."""
        while index in self._reasons:
            index = (index + 1) % self._num_samples
        return index

    def _message(self) -> str:
        shown = [f"{name} ({reason})" for name, reason in (self._reasons[i] for i in sorted(self._reasons))]
        more = f" and {len(shown) - _NAMES_SHOWN} more" if len(shown) > _NAMES_SHOWN else ""
        return (
            f"{len(shown)} image(s) of {self._where} cannot be read, --max_corrupt allows {self.allowed} of "
            f"{self._num_samples}: {', '.join(shown[:_NAMES_SHOWN])}{more}. "
            "Repair or delete them, or raise --max_corrupt"
        )
