"""Profiles of Fulgurite runs: windows of steps, their operations in a table, dumps of programs."""

__tracebackhide__ = True

from fulgurite_profiler.dump import ProgramDump as ProgramDump
from fulgurite_profiler.summary import (
    Operation as Operation,
    ProfileSummary as ProfileSummary,
    summarize_profile as summarize_profile,
)
from fulgurite_profiler.window import Profile as Profile
