"""The public names."""

import fulgurite.media as media  # noqa: F401
import fulgurite.metrics as metrics  # noqa: F401
from fulgurite.accounts import Accounts as Accounts
from fulgurite.consensus import Consensus as Consensus
from fulgurite.context import Context as Context
from fulgurite.data import ArrayData as ArrayData, Data as Data, Masked as Masked
from fulgurite.engine import Engine as Engine
from fulgurite.evaluation import EvaluatorSpec as EvaluatorSpec
from fulgurite.experiment import Experiment as Experiment, main as main
from fulgurite.hooks import hookimpl as hookimpl, hookspec as hookspec
from fulgurite.mode import is_training as is_training, training_mode as training_mode
from fulgurite.module import Module as Module, Output as Output, Task as Task
from fulgurite.paths import exclude as exclude, select as select
from fulgurite.records import History as History, Record as Record
from fulgurite.run import Replace as Replace, Result as Result, Run as Run, Scheduled as Scheduled, Stop as Stop
from fulgurite.runs import Checkpoint as Checkpoint, RunDirectory as RunDirectory, Snapshot as Snapshot
from fulgurite.sink import FileSink as FileSink
from fulgurite.state import TrainState as TrainState
from fulgurite.streams import Stream as Stream, Streams as Streams
from fulgurite.triggers import (
    At as At,
    AtEnd as AtEnd,
    AtStart as AtStart,
    Every as Every,
    EveryEpoch as EveryEpoch,
    Exponential as Exponential,
    First as First,
    FirstOfProcess as FirstOfProcess,
    Period as Period,
    Span as Span,
    Times as Times,
    Trigger as Trigger,
)
from fulgurite.update import (
    GradientUpdate as GradientUpdate,
    Phase as Phase,
    UpdateRule as UpdateRule,
    gradient as gradient,
)
from fulgurite.writer import Backend as Backend, Writer as Writer
