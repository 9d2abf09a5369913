"""Evaluations that compute their metrics in their own way: what they return, and how they fail."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fulgurite as fg
import numpy as np
from fulgurite.errors import EvaluationInterrupted, PluginError, is_shared
from fulgurite.metrics import flatten_nested
from fulgurite.plugins import EvaluationResult, as_numbers, split_media


@contextmanager
def share_failure(sharding: fg.ShardingStrategy) -> Iterator[None]:
    """Make a failure of the block on one process a failure on all of them.

    Otherwise the others would wait for this one at their next agreement. One that every process
    knows of already, such as that of the data, is not told again.
    """
    try:
        yield
    except EvaluationInterrupted:
        raise
    except Exception as error:
        if not is_shared(error):
            sharding.raise_on_any_process(error)
        raise
    sharding.raise_on_any_process(None)


def split_values(name: str, values: Any) -> EvaluationResult:
    """Return what a custom evaluation returned as metrics and media.

    Args:
        name: of the evaluator, for errors.
        values: by name: numbers, arrays of numbers, media, functions that return media, and
            dictionaries of these.

    Raises:
        PluginError: there is something else among the values.
    """
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise PluginError(
            f"evaluator {name!r} returned {values!r}; an evaluation returns metrics by name"
        )
    metrics, media = split_media(flatten_nested(values))
    numbers = as_numbers(metrics)
    for key, value in numbers.items():
        # The kinds of bool, int, unsigned int and float; bfloat16 is a `V` to NumPy.
        if np.asarray(value).dtype.kind not in "biufV":
            raise PluginError(
                f"the metric {key!r} of evaluator {name!r} is {type(value).__name__}: an "
                "evaluation gives numbers, arrays of them, and media"
            )
    return EvaluationResult(numbers, media)
