"""Early stopping, time limits and spike detection for Fulgurite."""

__tracebackhide__ = True

from fulgurite_stopping.early import EarlyStopping as EarlyStopping
from fulgurite_stopping.spikes import SpikeDetection as SpikeDetection
from fulgurite_stopping.time_limit import TimeLimit as TimeLimit
