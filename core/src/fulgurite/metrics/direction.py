"""Whether a larger or a smaller value of a metric is better, as far as its name tells."""

import re
from typing import Literal, get_args

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
            f"{where}: is a larger or a smaller {monitor!r} better? Its name does not tell: give "
            "mode='max' or mode='min'"
        )
    return mode_by_name


def find_mode(monitor: str) -> Mode | None:
    """Return whether the smallest or the largest value of a metric is the best, as its name
    `SOURCE/NAME` tells; None if it does not."""
    words = set(re.split(r"[^a-z0-9]+", monitor.rpartition("/")[2].lower()))
    is_lower = bool(words & _LOWER_IS_BETTER)
    is_higher = bool(words & _HIGHER_IS_BETTER)
    if is_lower == is_higher:
        return None
    return "min" if is_lower else "max"
