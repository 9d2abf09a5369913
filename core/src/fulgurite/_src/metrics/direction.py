"""Whether a larger or a smaller value of a metric is better, and whether a value is better than
another one: the one rule of all that stop, reduce, keep or choose by a metric."""

import math
import re
from collections.abc import Sequence
from typing import Any, Literal, get_args

from fulgurite.errors import ConfigurationError

Mode = Literal["min", "max"]
"""Whether the smallest or the largest value of a metric is the best."""

# Words in the last part of the name of a metric, `SOURCE/NAME`.
_LOWER_IS_BETTER = {
    "brier",
    "ece",
    "error",
    "loss",
    "mae",
    "mse",
    "nll",
    "perplexity",
    "regret",
    "rmse",
}
_HIGHER_IS_BETTER = {
    "accuracy",
    "auc",
    "bleu",
    "dice",
    "f1",
    "iou",
    "map",
    "mrr",
    "ndcg",
    "pearson",
    "precision",
    "psnr",
    "r2",
    "recall",
    "spearman",
    "ssim",
}


def resolve_mode(monitor: str, mode: Mode | None, where: str) -> Mode:
    """Return whether the smallest or the largest value of a metric is the best.

    Args:
        monitor: the metric, `SOURCE/NAME`.
        mode: as it was asked for; None to tell it from the name.
        where: of which plugin, for errors.

    Raises:
        ConfigurationError: `mode` is neither `min` nor `max`, or the name does not tell.

    Example:
        fg.metrics.resolve_mode("test/accuracy", None, "MyPlugin")  # "max"
    """
    if mode is not None:
        if mode not in get_args(Mode):
            raise ConfigurationError(f"{where}: mode is {mode!r}; choose 'max' or 'min'")
        return mode
    mode_by_name = find_mode(monitor)
    if mode_by_name is None:
        raise ConfigurationError(
            f"{where}: is a larger or a smaller {monitor!r} better? it cannot be inferred from the "
            "name: give mode='max' or mode='min'"
        )
    return mode_by_name


def find_mode(monitor: str) -> Mode | None:
    """Return whether the smallest or the largest value of a metric is the best, as its name
    `SOURCE/NAME` tells; None if it does not."""
    words = set(re.split(r"[^a-z0-9]+", monitor.rpartition("/")[2].lower()))
    if words & {"neg", "negative", "negated"}:
        return None  # as of `neg_mean_squared_error`, of which a larger value is better
    is_lower = bool(words & _LOWER_IS_BETTER)
    is_higher = bool(words & _HIGHER_IS_BETTER)
    if is_lower == is_higher:
        return None
    return "min" if is_lower else "max"


def is_better(
    value: float, best: float | None, mode: Mode, *, atol: float = 0.0, rtol: float = 0.0
) -> bool:
    """Return whether a value of a metric is better than the best one so far.

    It is if it lies beyond `best` by more than `atol + rtol * |best|`, whatever the sign of `best`.
    NaN and both infinities are not measurements: such a value is never better, and every finite
    value is better than it.

    Args:
        value: as measured now.
        best: what it is compared with; None before the first.
        mode: whether the smallest or the largest value is the best.
        atol: the least difference that counts.
        rtol: the same, as a part of `|best|`.

    Example:
        fg.metrics.is_better(-1.1, -1.0, "min", rtol=0.05)  # True
        fg.metrics.is_better(float("-inf"), -1.0, "min")  # False
    """
    if not math.isfinite(value):
        return False
    if best is None or not math.isfinite(best):
        return True
    return bool(is_beyond(value, best, mode, atol + rtol * abs(best)))


def rank(values: Sequence[float], mode: Mode) -> list[int]:
    """Return the positions of values from the best to the worst, as `is_better` compares them;
    those of equals, and of values that are not finite, in their order.

    Args:
        values: one for each candidate.
        mode: whether the smallest or the largest value is the best.

    Example:
        fg.metrics.rank([0.5, float("nan"), 0.9], "max")  # [2, 0, 1]
    """
    sign = 1 if mode == "min" else -1

    def get_key(index: int) -> float:
        return sign * values[index] if math.isfinite(values[index]) else math.inf

    return sorted(range(len(values)), key=get_key)


def is_beyond(value: Any, reference: Any, mode: Mode, margin: Any) -> Any:
    """Return whether a value lies beyond another one by more than a margin: below it in mode `min`,
    above it in mode `max`.

    Works on numbers and on arrays, traced ones too; for the latter NaN is beyond nothing.

    Args:
        value: as measured now.
        reference: what it is compared with.
        mode: `min` or `max`.
        margin: the least distance that does not count, at least 0.
    """
    distance = reference - value if mode == "min" else value - reference
    return distance > margin
