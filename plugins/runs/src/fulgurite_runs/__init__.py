"""Run directories of Fulgurite: their layout, who may write there, and JSON without loss."""

__tracebackhide__ = True

from fulgurite_runs.directory import (
    EvaluationDirectory as EvaluationDirectory,
    RunDirectory as RunDirectory,
)
from fulgurite_runs.opening import (
    RunPlugin as RunPlugin,
    get_run_directory as get_run_directory,
    open_run as open_run,
)
