"""Metrics that are merged exactly on the device: `fg.metrics.Mean.from_values(values, mask)`."""

from fulgurite.metrics.base import *  # noqa: F403
