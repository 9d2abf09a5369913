"""Fulgurite: a small engine that compiles and runs training steps, and plugins for everything
else."""

__tracebackhide__ = True

from typing import TYPE_CHECKING

from fulgurite import metrics
from fulgurite._src.data.batch import Batch
from fulgurite._src.data.sources import ArrayData, DataSource
from fulgurite._src.engine import Engine
from fulgurite._src.evaluation.evaluation import Evaluation
from fulgurite._src.evaluation.totals import EvaluationTotals
from fulgurite._src.face_names import make_getattr
from fulgurite._src.fit.actions import ReplaceState, ScheduledAction, StopTraining
from fulgurite._src.fit.history import History
from fulgurite._src.fit.lambda_plugin import LambdaPlugin
from fulgurite._src.fit.records import Record
from fulgurite._src.fit.result import FitResult
from fulgurite._src.fit.run import LoggedRun, Run
from fulgurite._src.fit.schedule import ActionSchedule
from fulgurite._src.fit.signals import forget_stop_request
from fulgurite._src.fit.snapshot import CheckpointRef, Snapshot
from fulgurite._src.model.ambient_rng import make_rng
from fulgurite._src.model.context import Context
from fulgurite._src.model.media import Media
from fulgurite._src.model.mode import is_training, training_mode
from fulgurite._src.model.module import Module, OptimizerSpec, Task
from fulgurite._src.model.output import Output
from fulgurite._src.plugins.markers import hookimpl, hookspec
from fulgurite._src.plugins.plugin import Plugin
from fulgurite._src.plugins.usage import PerFit
from fulgurite._src.rng import RngStream, RngStreams
from fulgurite._src.sharding import ProcessSync, ShardingStrategy, SingleDevice
from fulgurite._src.timing import Timings
from fulgurite._src.training.forward import collect_metrics
from fulgurite._src.training.nonfinite import NonFinitePolicy
from fulgurite._src.training.state import TrainState
from fulgurite._src.training.update import (
    GradientUpdate,
    UpdateRule,
    UpdateRuleWrapper,
    compute_gradients,
    conjugate_gradients,
)
from fulgurite._src.tree.select import Selector, exclude, select
from fulgurite._src.triggers import (
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

if not TYPE_CHECKING:  # or every name would be one
    __getattr__ = make_getattr(__name__)

__all__ = [
    "ActionSchedule",
    "ArrayData",
    "At",
    "AtEnd",
    "AtStart",
    "Batch",
    "CheckpointRef",
    "Context",
    "DataSource",
    "Engine",
    "Evaluation",
    "EvaluationTotals",
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
    "Media",
    "Module",
    "NonFinitePolicy",
    "OptimizerSpec",
    "Output",
    "PerFit",
    "Plugin",
    "ProcessSync",
    "Record",
    "ReplaceState",
    "RngStream",
    "RngStreams",
    "Run",
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
    "training_mode",
]
