"""Metrics beside those of `fulgurite.metrics`: classification, regression, calibration, ranking,
pictures, texts and samples; `docs/metrics.md` lists all.

Those of the kind `Metric` are merged on the device, have a fixed shape and do not depend on how the
examples were split; they are for training steps and evaluations. Those of the kind
`CollectingMetric` (`RocAuc`, `AveragePrecision`, `Collect` and more) are computed over the whole
set at once; they are for evaluations. Each class says in `higher_is_better` which direction is
better.
"""

__tracebackhide__ = True

from fulgurite_metrics.calibration import BrierScore, ExpectedCalibrationError, Perplexity
from fulgurite_metrics.classification import F1, ConfusionMatrix, FBeta, Precision, Recall
from fulgurite_metrics.correlation import Pearson, Spearman
from fulgurite_metrics.images import PSNR, SSIM
from fulgurite_metrics.norms import Norm
from fulgurite_metrics.ranking import (
    AveragePrecision,
    Collect,
    MultilabelAveragePrecision,
    PrecisionRecallCurve,
    RocAuc,
    RocAucOneVsRest,
)
from fulgurite_metrics.regression import R2, MeanAbsoluteError, MeanSquaredError
from fulgurite_metrics.retrieval import NDCG, MeanReciprocalRank
from fulgurite_metrics.sampled import Median, SampledObjects, SampledSet
from fulgurite_metrics.text import BLEU, CHRF

__all__ = [
    "BLEU",
    "CHRF",
    "F1",
    "NDCG",
    "PSNR",
    "R2",
    "SSIM",
    "AveragePrecision",
    "BrierScore",
    "Collect",
    "ConfusionMatrix",
    "ExpectedCalibrationError",
    "FBeta",
    "MeanAbsoluteError",
    "MeanReciprocalRank",
    "MeanSquaredError",
    "Median",
    "MultilabelAveragePrecision",
    "Norm",
    "Pearson",
    "Perplexity",
    "Precision",
    "PrecisionRecallCurve",
    "Recall",
    "RocAuc",
    "RocAucOneVsRest",
    "SampledObjects",
    "SampledSet",
    "Spearman",
]
