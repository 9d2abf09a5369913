"""Metrics: what they hold, how they are merged, and what a larger value means."""
