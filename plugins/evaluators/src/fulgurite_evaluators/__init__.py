"""Named evaluations for Fulgurite, during training or in a separate process, and exact metrics."""

from fulgurite_evaluators.evaluator import Evaluator as Evaluator
from fulgurite_evaluators.results import Evaluated as Evaluated, results as results
from fulgurite_evaluators.standalone import EveryCheckpoint as EveryCheckpoint, LastCheckpoint as LastCheckpoint
