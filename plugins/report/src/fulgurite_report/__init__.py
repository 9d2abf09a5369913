"""Runs of Fulgurite seen from their files: one HTML page without a server, and a view in the
terminal.

Nothing here imports jax or the core, which take seconds: the files of a run are JSON.
"""

__tracebackhide__ = True

from fulgurite_report.errors import ReportError as ReportError
from fulgurite_report.page import write_report as write_report
from fulgurite_report.run import Run as Run, find_runs as find_runs

__all__ = ["ReportError", "Run", "find_runs", "write_report"]
