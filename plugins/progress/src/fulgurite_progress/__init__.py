"""Show in the terminal what a run is doing; active once it is installed."""

__tracebackhide__ = True

from fulgurite_progress.plugin import ProgressBar as ProgressBar
from fulgurite_progress.summary import (
    model_summary as model_summary,
    parameter_table as parameter_table,
)
from fulgurite_progress.times import timing_table as timing_table
