"""Whether a smaller or a larger value of a metric is the better one, as far as its name tells: the
rule is that of `fulgurite.metrics.resolve_mode`, which is not imported, because it imports jax."""

import re

LOWER_IS_BETTER = {
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
HIGHER_IS_BETTER = {
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
NEGATED = {"neg", "negative", "negated"}
"""In the name of a metric of which the opposite is measured, such as `neg_mean_squared_error`."""


def find_mode(name: str) -> str | None:
    """Return `min` or `max` for a metric `SOURCE/NAME`; None if its name does not tell."""
    words = set(re.split(r"[^a-z0-9]+", name.rpartition("/")[2].lower()))
    if words & NEGATED:
        return None
    is_lower = bool(words & LOWER_IS_BETTER)
    if is_lower == bool(words & HIGHER_IS_BETTER):
        return None
    return "min" if is_lower else "max"
