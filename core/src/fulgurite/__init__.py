"""Fulgurite: a small engine that compiles and runs training steps, and plugins for everything
else."""

from fulgurite import metrics
from fulgurite.data.sources import ArrayData, Batch, DataSource, MaskedBatch
from fulgurite.engine import Engine
from fulgurite.evaluation.evaluator import Evaluator
from fulgurite.evaluation.totals import EvaluationTotals
from fulgurite.fit.actions import ReplaceState, ScheduledAction, StopTraining
from fulgurite.fit.lambda_plugin import LambdaPlugin
from fulgurite.fit.records import History, Record
from fulgurite.fit.run import FitResult, LoggedRun, Run
from fulgurite.fit.schedule import Schedule
from fulgurite.fit.signals import forget_stop_request
from fulgurite.fit.snapshot import CheckpointRef, Snapshot
from fulgurite.model.ambient_rng import make_rng
from fulgurite.model.context import Context
from fulgurite.model.media import Media
from fulgurite.model.mode import is_training, training_mode
from fulgurite.model.module import Module, OptimizerSpec, Task
from fulgurite.model.output import Output
from fulgurite.model.sow import sow
from fulgurite.plugins.markers import hookimpl, hookspec
from fulgurite.plugins.usage import PerFit
from fulgurite.rng import RngStream, RngStreams
from fulgurite.sharding import ProcessSync, ShardingStrategy, SingleDevice
from fulgurite.timing import Timings
from fulgurite.training.forward import collect_metrics
from fulgurite.training.nonfinite import NonFinitePolicy
from fulgurite.training.state import TrainState
from fulgurite.training.update import (
    GradientUpdate,
    UpdateRule,
    UpdateRuleWrapper,
    compute_gradients,
    conjugate_gradients,
)
from fulgurite.tree.select import Selector, exclude, select
from fulgurite.triggers import (
    At,
    AtEnd,
    AtStart,
    EvenlySpaced,
    Every,
    EveryEpoch,
    EverySeconds,
    Exponential,
    FirstSteps,
    FirstStepsAfterStart,
    StepRange,
    Trigger,
)

__all__ = [
    "ArrayData",
    "At",
    "AtEnd",
    "AtStart",
    "Batch",
    "CheckpointRef",
    "Context",
    "DataSource",
    "Engine",
    "EvaluationTotals",
    "Evaluator",
    "EvenlySpaced",
    "Every",
    "EveryEpoch",
    "EverySeconds",
    "Exponential",
    "FirstSteps",
    "FirstStepsAfterStart",
    "FitResult",
    "GradientUpdate",
    "History",
    "LambdaPlugin",
    "LoggedRun",
    "MaskedBatch",
    "Media",
    "Module",
    "NonFinitePolicy",
    "OptimizerSpec",
    "Output",
    "PerFit",
    "ProcessSync",
    "Record",
    "ReplaceState",
    "RngStream",
    "RngStreams",
    "Run",
    "Schedule",
    "ScheduledAction",
    "Selector",
    "ShardingStrategy",
    "SingleDevice",
    "Snapshot",
    "StepRange",
    "StopTraining",
    "Task",
    "Timings",
    "TrainState",
    "Trigger",
    "UpdateRule",
    "UpdateRuleWrapper",
    "collect_metrics",
    "compute_gradients",
    "conjugate_gradients",
    "exclude",
    "forget_stop_request",
    "hookimpl",
    "hookspec",
    "is_training",
    "make_rng",
    "metrics",
    "select",
    "sow",
    "training_mode",
]
