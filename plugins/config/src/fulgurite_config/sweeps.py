"""Sweeps: configurations for each combination of values."""

import hashlib
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from fulgurite_config.comparison import copy
from fulgurite_config.errors import ConfigError
from fulgurite_config.grammar import GrammarError, split_items
from fulgurite_config.nodes import Node
from fulgurite_config.overrides import apply_overrides
from fulgurite_config.paths import OVERRIDE, normalize_path, split_override

MAX_BYTES = 200
"""How much of a name there is before its digest: file systems take 255 bytes, with an ending."""


class Trial(NamedTuple):
    """A configuration of a sweep.

    Example:
        from fulgurite_config import L, sweep

        trials = sweep(L(rate=0.1), ["rate=0.1,0.01"])
        assert [trial.name for trial in trials] == ["rate=0.1", "rate=0.01"]

    Attributes:
        name: the overrides as a folder may be called; with a digest of them if they are long, end
            in `.log`, or would be called the same as others.
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
        axes: strings `rate=1e-3,1e-2`. Several paths that change together are joined with commas:
            `width,name=(16,small),(32,big)`.

    Raises:
        ConfigError: an axis is none, an override does not fit, a path is set twice, or two trials
            would be the same.
    """
    trials = []
    for name, overrides in expand_axes(axes).items():
        changed = copy(config)
        apply_overrides(changed, overrides)
        trials.append(Trial(name, overrides, changed))
    return trials


def expand_axes(axes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the overrides of each trial of a sweep by its name.

    Args:
        axes: strings, as `sweep` takes them.

    Raises:
        ConfigError: an axis is none, a path is set twice, or two trials would be the same.
    """
    points = [_expand_axis(axis) for axis in axes]
    paths = [split_override(override)[0] for axis in points for override in axis[0]]
    for path, count in Counter(paths).items():
        if count > 1:
            raise ConfigError(f"{path} is set twice in the sweep: give all its values at once")
    trials = [tuple(itertools.chain(*groups)) for groups in itertools.product(*points)]
    names = Counter(_fold(_make_name(overrides)) for overrides in trials)
    expanded: dict[str, tuple[str, ...]] = {}
    for overrides in trials:
        name = _make_name(overrides)
        if names[_fold(name)] > 1:
            name = f"{name}-{_make_digest(overrides)}"
        if name in expanded:
            raise ConfigError(f"the sweep has {','.join(overrides)} twice: leave one out")
        expanded[name] = overrides
    return expanded


def _make_name(overrides: Sequence[str]) -> str:
    """Return overrides as a folder may be called: Orbax takes `*`, `?` and `[` in a path for a
    pattern, and `$` begins the name of a variable where a path is given."""
    text = ",".join(overrides).replace("**.", "").replace("*", "all")
    text = text.replace("[", ".").replace("]", "")
    name = re.sub(r"[/\\?'\"\s$]", "_", text)
    # `a.log` beside the folder `a` is what its run prints.
    if len(name.encode()) <= MAX_BYTES and not name.lower().endswith(".log"):
        return name
    start = name.encode()[:MAX_BYTES].decode(errors="ignore")
    return f"{start}-{_make_digest(overrides)}"


def _fold(name: str) -> str:
    """Return what names have in common that are one file to some file system: the case of letters
    and the way in which accents are written."""
    return unicodedata.normalize("NFC", name).casefold()


def _make_digest(overrides: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(overrides).encode()).hexdigest()[:8]


def _expand_axis(axis: str) -> list[tuple[str, ...]]:
    """Return the overrides of each point of an axis of a sweep.

    Raises:
        ConfigError: there is no value, or a group has another number of values than paths.
    """
    paths, values = split_axis(axis)
    points = _split(values, axis)
    if not points:
        raise ConfigError(f"{axis!r} is not an axis of a sweep: write path=value,value")
    if len(paths) == 1:
        return [(f"{paths[0]}={point}",) for point in points]
    expanded = []
    for point in points:
        parts = _split(point[1:-1], axis) if point.startswith("(") and point.endswith(")") else []
        if len(parts) != len(paths):
            raise ConfigError(
                f"{point} in {axis!r} must hold {len(paths)} values: ({', '.join(paths)})"
            )
        expanded.append(tuple(f"{path}={part}" for path, part in zip(paths, parts, strict=True)))
    return expanded


def split_axis(axis: str) -> tuple[list[str], str]:
    """Return the paths that an axis of a sweep sets, and the text of its values.

    Raises:
        ConfigError: it is none.
    """
    match = OVERRIDE.match(axis)
    paths = _split(normalize_path(match[1]), axis) if match else []
    if match is None or not paths:
        raise ConfigError(f"{axis!r} is not an axis of a sweep: write path=value,value")
    return paths, match[2]


def _split(text: str, axis: str) -> list[str]:
    """Return what stands between the commas of a string.

    Args:
        text: a part of an axis.
        axis: all of it, for the error.
    """
    try:
        return split_items(text)
    except GrammarError as error:
        raise ConfigError(f"{axis!r} is not an axis of a sweep: {error}") from None
