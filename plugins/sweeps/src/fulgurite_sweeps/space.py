"""Search spaces: what a trial may change, and between which values."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from fulgurite.errors import ConfigurationError, did_you_mean
from fulgurite_config import ConfigError, split_override
from optuna.distributions import BaseDistribution

from fulgurite_sweeps.axes import (
    Axis,
    format_axis,
    format_value,
    make_axis,
    parse_axis,
    read_axis,
)


@dataclass(frozen=True)
class Space:
    """What a sweep searches, and what all its trials have.

    Example:
        from fulgurite_sweeps import Space

        space = Space.parse(
            ["steps=100", "optimizer=adam,sgd", "momentum=float(0,0.99) if optimizer=sgd"]
        )
        space.fixed  # ("steps=100",)
        space.build_overrides({"optimizer": "adam"})  # ["steps=100", "optimizer=adam"]

    Attributes:
        axes: what is searched, by name; one with a condition stands behind the axis that it names.
        fixed: the overrides of all trials.
    """

    axes: dict[str, Axis]
    fixed: tuple[str, ...] = ()

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> "Space":
        """Return the space of a command line.

        Args:
            arguments: strings `path=log(1e-5,1e-1)`, `path=value,value` and `path=value`, of which
                the last sets an argument for all trials. `width,name=(16,small),(32,big)` changes
                several together, and `path=log(1e-5,1e-1) if other=value` is searched only then.

        Raises:
            ConfigurationError: one of them has another form, or a path is set twice.
        """
        axes: dict[str, Axis] = {}
        fixed: list[str] = []
        for argument in arguments:
            axis = parse_axis(argument, axes)
            if axis is None:
                fixed.append(argument)
            else:
                _add_axis(axes, axis)
        space = cls(axes, tuple(fixed))
        space._check_paths()
        return space

    @classmethod
    def make(
        cls, axes: Mapping[str, Any] | Sequence[str], overrides: Sequence[str] = ()
    ) -> "Space":
        """Return the space of a Python program.

        Args:
            axes: by path a string as on the command line, a list of values, or a distribution of
                Optuna. Or the strings of a command line.
            overrides: strings `path=value` that all trials have.

        Raises:
            ConfigurationError: one of them is not of that form.
        """
        if not isinstance(axes, Mapping):
            return cls.parse([*overrides, *axes])
        fixed = list(overrides)
        axes_by_name: dict[str, Axis] = {}
        for name, value in axes.items():
            text = f"{name}={value}"
            axis = (
                parse_axis(text, axes_by_name) if isinstance(value, str) else make_axis(name, value)
            )
            if axis is None:
                fixed.append(text)
            else:
                _add_axis(axes_by_name, axis)
        space = cls(axes_by_name, tuple(fixed))
        space._check_paths()
        return space

    def _check_paths(self) -> None:
        """Raise an error if something is set twice."""
        try:
            paths = [split_override(override)[0] for override in self.fixed]
        except ConfigError as error:
            raise ConfigurationError(str(error)) from error
        paths += itertools.chain(*(axis.paths for axis in self.axes.values()))
        for path, count in Counter(paths).items():
            if count > 1:
                raise _make_twice_error(path)

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Optuna's distributions by the names of the axes."""
        return {name: axis.distribution for name, axis in self.axes.items()}

    def iter_active(self, point: Mapping[str, Any]) -> Iterable[Axis]:
        """Yield the axes of which a trial has a value, those with a condition only if it holds.

        Args:
            point: values by the names of the axes; it may grow while this runs.
        """
        return (axis for axis in self.axes.values() if axis.is_active(point))

    def suggest(self, trial: optuna.Trial) -> None:
        """Have the sampler choose the values of a trial.

        Args:
            trial: it.
        """
        point: dict[str, Any] = {}
        for axis in self.iter_active(point):
            point[axis.name] = axis.suggest(trial)

    def is_point(self, values: Mapping[str, Any]) -> bool:
        """Return whether a trial has all the values that it needs.

        Args:
            values: by the names of the axes.
        """
        return all(axis.name in values for axis in self.iter_active(values))

    def build_overrides(self, values: Mapping[str, Any]) -> list[str]:
        """Return the overrides of a trial, those that all trials have first.

        Args:
            values: by the names of the axes.
        """
        changes = (axis.build_overrides(values[axis.name]) for axis in self.iter_active(values))
        return [*self.fixed, *itertools.chain(*changes)]

    def list_points(self) -> list[dict[str, Any]]:
        """Return all points, those of the last axis next to each other.

        Raises:
            ConfigurationError: there are infinitely many.
        """
        points: list[dict[str, Any]] = [{}]
        for name, axis in self.axes.items():
            values = axis.list_values()
            points = [
                longer
                for point in points
                for longer in (
                    [{**point, name: value} for value in values]
                    if axis.is_active(point)
                    else [point]
                )
            ]
        return points

    def list_samples(self) -> list[dict[str, Any]]:
        """Return points that have each sample of each axis at least once, and those of one with a
        condition with each value that it names."""
        count = max((len(axis.list_samples()) for axis in self.axes.values()), default=1)
        points = [self._build_sample({}, index) for index in range(count)]
        for axis in self.axes.values():
            if axis.condition is not None:
                points += [
                    self._build_sample(self._find_cause(axis, value), index)
                    for value in axis.condition.values
                    for index in range(len(axis.list_samples()))
                ]
        return points

    def _build_sample(self, required: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Return a point.

        Args:
            required: values that it has.
            index: which sample of the others it has, counted from the first again after the last.
        """
        point: dict[str, Any] = {}
        for axis in self.iter_active(point):
            samples = axis.list_samples()
            point[axis.name] = required.get(axis.name, samples[index % len(samples)])
        return point

    def _find_cause(self, axis: Axis, value: Any) -> dict[str, Any]:
        """Return values with which an axis is searched.

        Args:
            axis: with a condition.
            value: of the axis that it names.
        """
        assert axis.condition is not None
        cause = {axis.condition.name: value}
        other = self.axes[axis.condition.name]
        if other.condition is None:
            return cause
        return cause | self._find_cause(other, other.condition.values[0])

    def make_point(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a point that a user wants tried; what it leaves out, the sampler chooses.

        Args:
            values: by the names of the axes, as the space lists them or as strings.

        Raises:
            ConfigurationError: an axis has no such value, or there is no such axis.
        """
        point = {}
        for name, value in values.items():
            if name not in self.axes:
                raise ConfigurationError(
                    f"{name}={value} cannot be tried first: nothing called {name!r} is searched. "
                    f"{did_you_mean(name, self.axes)}"
                )
            point[name] = self.axes[name].parse_value(format_value(value))
        for name in point:
            axis = self.axes[name]
            if not axis.is_active(point):
                raise ConfigurationError(
                    f"{name} cannot be tried first: it is searched only if {axis.condition}, which "
                    "the point must say, too"
                )
        return point

    def describe(self) -> dict[str, str]:
        """Return what is searched along each axis, as it is written on the command line."""
        return {name: format_axis(axis) for name, axis in self.axes.items()}

    def describe_axes(self) -> list[dict[str, Any]]:
        """Return the axes as JSON, of which `read` makes them again: a value of a Python program
        may hold what separates values on the command line."""
        return [axis.describe() for axis in self.axes.values()]

    @classmethod
    def read(cls, axes: Sequence[Mapping[str, Any]], overrides: Sequence[str]) -> "Space":
        """Return the space of an earlier start.

        Args:
            axes: what `describe_axes` has returned.
            overrides: strings `path=value` that all trials have.
        """
        axes_by_name = {description["name"]: read_axis(description) for description in axes}
        return cls(axes_by_name, tuple(overrides))


def split_point(text: str) -> dict[str, str]:
    """Return the values of a point by the names of the axes.

    Args:
        text: strings `name=value` with spaces between them.
    """
    items = [item.partition("=") for item in text.split()]
    return {name: value for name, _, value in items}


def _add_axis(axes: dict[str, Axis], axis: Axis) -> None:
    """Add an axis to those before it.

    Args:
        axes: those before it, to which it is added.
        axis: it.
    """
    if axis.name in axes:
        raise _make_twice_error(axis.name)
    axes[axis.name] = axis


def _make_twice_error(path: str) -> ConfigurationError:
    return ConfigurationError(f"{path} is set twice: give all its values at once")
