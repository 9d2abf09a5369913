"""Sharpness-aware minimization."""

__tracebackhide__ = True

from fulgurite_sam.plugin import Sam as Sam
