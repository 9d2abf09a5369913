"""Profiles of Fulgurite runs: windows of steps, their operations in a table, dumps of programs."""

__tracebackhide__ = True
