"""Sweeps: configurations for each combination of values."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from fulgurite_config.comparison import copy
from fulgurite_config.errors import ConfigError
from fulgurite_config.nodes import Node
from fulgurite_config.overrides import apply_overrides
from fulgurite_config.values import split_commas


class Trial(NamedTuple):
    """A configuration of a sweep.

    Example:
        from fulgurite_config import L, sweep

        trials = sweep(L(rate=0.1), ["rate=0.1,0.01"])
        assert [trial.name for trial in trials] == ["rate=0.1", "rate=0.01"]

    Attributes:
        name: the overrides as a folder may be called.
        overrides: what was changed.
        config: the configuration.
    """

    name: str
    overrides: tuple[str, ...]
    config: Node


def sweep(config: Any, axes: Sequence[str]) -> list[Trial]:
    """Return the configurations of a sweep, those of the last axis next to each other.

    Args:
        config: what each trial changes a copy of.
        axes: texts `rate=1e-3,1e-2`. Several paths that change together are joined with commas:
            `width,name=(16,small),(32,big)`.

    Raises:
        ConfigError: an axis is none, or an override does not fit.
    """
    return [
        _make_trial(config, overrides)
        for overrides in itertools.product(*(expand_axis(axis) for axis in axes))
    ]


def _make_trial(config: Any, groups: Sequence[tuple[str, ...]]) -> Trial:
    overrides = tuple(override for group in groups for override in group)
    changed = copy(config)
    apply_overrides(changed, overrides)
    name = ",".join(overrides).replace("/", "_")
    return Trial(name, overrides, changed)


def expand_axis(axis: str) -> list[tuple[str, ...]]:
    """Return the overrides of each point of an axis of a sweep.

    Raises:
        ConfigError: there is no value, or a group has another number of values than paths.
    """
    text, equals, values = axis.partition("=")
    paths = split_commas(text)
    points = split_commas(values)
    if not equals or not points:
        raise ConfigError(f"{axis!r} is no axis of a sweep: write path=value,value")
    if len(paths) == 1:
        return [(f"{paths[0]}={point}",) for point in points]
    expanded = []
    for point in points:
        parts = split_commas(point[1:-1]) if point.startswith("(") else []
        if len(parts) != len(paths):
            raise ConfigError(
                f"{point} in {axis!r} must hold {len(paths)} values: ({', '.join(paths)})"
            )
        expanded.append(tuple(f"{path}={part}" for path, part in zip(paths, parts, strict=True)))
    return expanded
