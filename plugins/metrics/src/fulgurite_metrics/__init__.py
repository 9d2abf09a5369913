"""Metrics for classification and regression, beside those of `fulgurite.metrics`; `docs/metrics.md`
lists all.

Of the kind `Metric`: summed up on the device, of fixed shape, exact in any grouping; for windows
and evaluators. Of the kind `CollectingMetric` (`RocAuc`, `AveragePrecision`, `Collect`): over the
whole set at once; for evaluators.
"""

from fulgurite_metrics.calibration import ExpectedCalibrationError, Perplexity
from fulgurite_metrics.classification import F1, ConfusionMatrix, Precision, Recall
from fulgurite_metrics.ranking import AveragePrecision, Collect, RocAuc
from fulgurite_metrics.regression import R2, MeanAbsoluteError, MeanSquaredError
from fulgurite_metrics.sampled import Median, SampledSet

__all__ = [
    "F1",
    "R2",
    "AveragePrecision",
    "Collect",
    "ConfusionMatrix",
    "ExpectedCalibrationError",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Median",
    "Perplexity",
    "Precision",
    "Recall",
    "RocAuc",
    "SampledSet",
]
