"""Evaluations: what to evaluate, on which weights, how the metrics of a batch come about, and the
program that runs them."""
