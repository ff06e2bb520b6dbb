"""``fleet.metrics``: metrics of all ranks from each rank's sums. Fleet's names and arguments (Paddle 2.x).

All ranks call them, in the same order. Counts are added as 64-bit numbers, so they are exact. A statistic is an array
(what was fetched and added up), a persistable variable, or its name. ``scope``: where variables are, by default
Paddle's global scope. ``util``: what has another ``all_reduce(array, mode)``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.job import Array
from fleet_train.convert.calls import reduce
from fleet_train.errors import ConversionError


def sum(input: Any, scope: Any = None, util: Any = None) -> Array:
    """The sum over ranks, of the input's shape; integers become int64."""
    return _over_ranks("sum", input, scope, util)


def max(input: Any, scope: Any = None, util: Any = None) -> Array:
    """The largest value over ranks, element by element."""
    return _over_ranks("max", input, scope, util)


def min(input: Any, scope: Any = None, util: Any = None) -> Array:
    """The smallest value over ranks, element by element."""
    return _over_ranks("min", input, scope, util)


def auc(stat_pos: Any, stat_neg: Any, scope: Any = None, util: Any = None) -> float:
    """Area under the ROC curve, from counts of positive and negative samples by bucket of their prediction.

    ``stat_pos`` and ``stat_neg``: those of ``paddle.metric.Auc``, or of ``paddle.static.auc`` added up over batches.
    Without samples of both kinds: 0.5, as in Fleet.
    """
    both = [_value(stat, scope) for stat in (stat_pos, stat_neg)]
    counts = np.stack([stat.reshape(-1, stat.shape[-1] if stat.ndim else 1)[0] for stat in both])
    positive, negative = _total("auc", counts, "sum", util).astype(np.float64)[:, ::-1]
    if positive.sum() * negative.sum() == 0:
        return 0.5
    hits = np.concatenate([[0.0], np.cumsum(positive)])
    area = np.dot(negative, (hits[:-1] + hits[1:]) / 2)
    return float(area / (positive.sum() * negative.sum()))


def mae(abserr: Any, total_ins_num: Any, scope: Any = None, util: Any = None) -> float:
    """Mean absolute error, from the sum of absolute errors and the number of samples."""
    return _quotient("mae", abserr, total_ins_num, scope, util)


def mse(sqrerr: Any, total_ins_num: Any, scope: Any = None, util: Any = None) -> float:
    """Mean squared error, from the sum of squared errors and the number of samples."""
    return _quotient("mse", sqrerr, total_ins_num, scope, util)


def rmse(sqrerr: Any, total_ins_num: Any, scope: Any = None, util: Any = None) -> float:
    """The root of ``mse``."""
    return math.sqrt(_quotient("rmse", sqrerr, total_ins_num, scope, util))


def acc(correct: Any, total: Any, scope: Any = None, util: Any = None) -> float:
    """Accuracy, from the numbers of correct and of all predictions."""
    return _quotient("acc", correct, total, scope, util)


def _quotient(name: str, above: Any, below: Any, scope: Any, util: Any) -> float:
    """The first element of one sum divided by that of the other."""
    mine = [float(_value(statistic, scope).reshape(-1)[0]) for statistic in (above, below)]
    over, under = _total(name, np.array(mine), "sum", util)
    if under == 0:
        raise ConversionError(f"fleet.metrics.{name}: the number of samples is 0 on all ranks")
    return float(over / under)


def _over_ranks(mode: str, statistic: Any, scope: Any, util: Any) -> Array:
    value = _value(statistic, scope)
    total = _total(mode, value, mode, util)
    result: Array = total.astype(value.dtype) if value.dtype.kind == "f" else total
    return result


def _total(name: str, values: Array, mode: str, util: Any) -> Array:
    wide: Array = values.astype(np.float64 if values.dtype.kind == "f" else np.int64)
    if util is None:
        return reduce(f"fleet.metrics.{name}()", wide, mode)
    total: Array = np.asarray(util.all_reduce(wide, mode)).reshape(wide.shape)
    return total


def _value(statistic: Any, scope: Any) -> Array:
    if not isinstance(statistic, (str, paddle.pir.Value)):
        return np.asarray(statistic)
    name = statistic if isinstance(statistic, str) else getattr(statistic, "name", "")
    variable = (scope or paddle.static.global_scope()).find_var(name)
    if variable is None:
        raise ConversionError(f"fleet.metrics: there is no variable {name!r}; fetch the value, and pass the array")
    return np.asarray(variable.get_tensor())
