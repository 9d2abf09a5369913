"""Metrics that are merged exactly on the device: `fg.metrics.Mean.from_values(values, mask)`.

All that is about metrics alone is here. What needs a run, such as whether a metric is measured at
some step, is in `fulgurite.plugins`.
"""

from fulgurite._src.metrics.accumulator import MetricAccumulator
from fulgurite._src.metrics.base import (
    CollectingMetric,
    Mask,
    Metric,
    RunningMetric,
    Value,
    Values,
    apply_mask,
    as_class_indices,
    flatten_nested,
    is_metric,
    sort_by_kind,
    to_float,
)
from fulgurite._src.metrics.basic import (
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
from fulgurite._src.metrics.conversion import (
    as_loss_metric,
    as_mean,
    as_metrics,
    group_by_weight,
    split_loss,
    sum_values,
)
from fulgurite._src.metrics.direction import (
    Mode,
    find_mode,
    is_better,
    is_beyond,
    rank,
    resolve_mode,
)
from fulgurite._src.metrics.weights import note_weight, share_weight

__all__ = [  # noqa: RUF022 - by subject
    # Kinds of metrics.
    "CollectingMetric",
    "Metric",
    "RunningMetric",
    # Metrics.
    "Accuracy",
    "ExponentialMovingAverage",
    "LastValue",
    "Max",
    "Mean",
    "Min",
    "Std",
    "Sum",
    "SumOfMeans",
    # What a metric of your own is written with.
    "Mask",
    "Value",
    "Values",
    "apply_mask",
    "as_class_indices",
    "to_float",
    # Which value is the better one.
    "Mode",
    "find_mode",
    "is_better",
    "is_beyond",
    "rank",
    "resolve_mode",
    # What a step returns: metrics by name, losses and what they are means over.
    "MetricAccumulator",
    "as_loss_metric",
    "as_mean",
    "as_metrics",
    "flatten_nested",
    "group_by_weight",
    "is_metric",
    "note_weight",
    "share_weight",
    "sort_by_kind",
    "split_loss",
    "sum_values",
]
