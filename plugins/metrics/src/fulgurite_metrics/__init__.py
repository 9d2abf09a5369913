"""Metrics for classification and regression, beside those of `fulgurite.metrics`; `docs/metrics.md`
lists all.

Those of the kind `Metric` are merged on the device, have a fixed shape and do not depend on how the
examples were split; they are for training steps and evaluations. Those of the kind
`CollectingMetric` (`RocAuc`, `AveragePrecision`, `Collect`) are computed over the whole set at
once; they are for evaluations.
"""

from fulgurite_metrics.calibration import ExpectedCalibrationError, Perplexity
from fulgurite_metrics.classification import F1, ConfusionMatrix, Precision, Recall
from fulgurite_metrics.ranking import AveragePrecision, Collect, RocAuc
from fulgurite_metrics.regression import R2, MeanAbsoluteError, MeanSquaredError
from fulgurite_metrics.sampled import Median, SampledObjects, SampledSet

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
    "SampledObjects",
    "SampledSet",
]
