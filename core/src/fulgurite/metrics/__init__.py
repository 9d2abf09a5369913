"""Metrics that are merged exactly on the device: `fg.metrics.Mean.from_values(values, mask)`."""

from fulgurite.metrics.base import (
    CollectingMetric,
    Mask,
    Metric,
    MetricAccumulator,
    RunningMetric,
    Value,
    Values,
    apply_mask,
    as_class_indices,
    to_float,
)
from fulgurite.metrics.basic import (
    Accuracy,
    ExponentialMovingAverage,
    LastValue,
    Max,
    Mean,
    Min,
    Std,
    Sum,
    SumOfMeans,
)
from fulgurite.metrics.conversion import as_metric
from fulgurite.metrics.direction import Mode, find_mode, is_better, rank, resolve_mode

__all__ = [
    "Accuracy",
    "CollectingMetric",
    "ExponentialMovingAverage",
    "LastValue",
    "Mask",
    "Max",
    "Mean",
    "Metric",
    "MetricAccumulator",
    "Min",
    "Mode",
    "RunningMetric",
    "Std",
    "Sum",
    "SumOfMeans",
    "Value",
    "Values",
    "apply_mask",
    "as_class_indices",
    "as_metric",
    "find_mode",
    "is_better",
    "rank",
    "resolve_mode",
    "to_float",
]
