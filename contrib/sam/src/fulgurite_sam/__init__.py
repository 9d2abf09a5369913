"""Sharpness-aware minimization."""

from fulgurite_sam.plugin import Sam as Sam
