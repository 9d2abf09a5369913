"""Named evaluations for Fulgurite, during training or in a separate process."""

__tracebackhide__ = True

from fulgurite_evaluators.evaluator import Evaluator as Evaluator
from fulgurite_evaluators.predictions import PredictionWriter as PredictionWriter
from fulgurite_evaluators.results import (
    EvaluationRecord as EvaluationRecord,
    read_results as read_results,
)
from fulgurite_evaluators.standalone import (
    EveryCheckpoint as EveryCheckpoint,
    LastCheckpoint as LastCheckpoint,
)
