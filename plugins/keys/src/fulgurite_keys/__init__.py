"""Losses, metrics, summaries and the inputs of models, wired together by keys such as
`preds.logits` and `interms.encoder`; `docs/keys.md` is the guide."""

__tracebackhide__ = True

from fulgurite_keys.losses import (
    L1,
    L2,
    Huber,
    Loss,
    LossFunction,
    NegativeCosine,
    SigmoidBinaryCrossEntropy,
    SoftmaxCrossEntropy,
    Value,
)
from fulgurite_keys.measures import MeanOfMeans, Measure, TreeMean, keyed
from fulgurite_keys.plugins import Losses, Metrics, Summaries
from fulgurite_keys.scope import Key, register_prefix
from fulgurite_keys.shown import Histogram, Images, Summary
from fulgurite_keys.sowing import sow
from fulgurite_keys.task import KeyedTask
from fulgurite_keys.typed import PathBuilder, build_path

__all__ = [
    "L1",
    "L2",
    "Histogram",
    "Huber",
    "Images",
    "Key",
    "KeyedTask",
    "Loss",
    "LossFunction",
    "Losses",
    "MeanOfMeans",
    "Measure",
    "Metrics",
    "NegativeCosine",
    "PathBuilder",
    "SigmoidBinaryCrossEntropy",
    "SoftmaxCrossEntropy",
    "Summaries",
    "Summary",
    "TreeMean",
    "Value",
    "build_path",
    "keyed",
    "register_prefix",
    "sow",
]
