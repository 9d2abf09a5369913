"""Search spaces: what a trial may change, and between which values."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fulgurite.errors import ConfigurationError, did_you_mean
from fulgurite_config import ConfigError, expand_axes, split_axis, split_override
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from fulgurite_sweeps.calls import Call, parse_call

FORMS = (
    "log(low,high), float(low,high), float(low,high,step=S), int(low,high), int(low,high,log) or "
    "int(low,high,step=S)"
)
"""How numbers are searched, for errors."""


@dataclass(frozen=True)
class Axis:
    """What is searched together: one argument of a program, or several that change together.

    Attributes:
        name: the path of the argument in the program's configuration, or several with commas.
        distribution: Optuna's, of numbers or of choices, which are strings.
        overrides: what each choice sets; empty for numbers.
    """

    name: str
    distribution: BaseDistribution
    overrides: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def paths(self) -> list[str]:
        """The paths that it sets."""
        return split_axis(f"{self.name}=0")[0]

    def build_overrides(self, value: Any) -> tuple[str, ...]:
        """Return the overrides `path=value` of a value.

        Args:
            value: a number, or the string of a choice.
        """
        if self.overrides:
            return self.overrides[value]
        # The shortest string that is read as the same float.
        return (f"{self.name}={value!r}",)

    def parse_value(self, text: str) -> Any:
        """Return a value that a user wants tried.

        Args:
            text: as on the command line.

        Raises:
            ConfigurationError: the axis has no such value.
        """
        if isinstance(self.distribution, CategoricalDistribution):
            if text not in self.overrides:
                raise ConfigurationError(
                    f"{self.name}={text} is not in the search space. "
                    f"{did_you_mean(text, self.overrides)}"
                )
            return text
        assert isinstance(self.distribution, FloatDistribution | IntDistribution)
        convert = int if isinstance(self.distribution, IntDistribution) else float
        value = _convert(text, convert, self.name)
        if not self.distribution.low <= value <= self.distribution.high:
            raise ConfigurationError(
                f"{self.name}={text} is not in the search space, {format_distribution(self)}"
            )
        return value

    def list_samples(self) -> list[Any]:
        """Return values that stand for all: each choice, or the smallest and the largest number."""
        if isinstance(self.distribution, FloatDistribution | IntDistribution):
            return [self.distribution.low, self.distribution.high]
        return list(self.overrides)

    def list_values(self) -> list[Any]:
        """Return all values, in order.

        Raises:
            ConfigurationError: there are infinitely many.
        """
        distribution = self.distribution
        if isinstance(distribution, IntDistribution):
            return list(range(distribution.low, distribution.high + 1, distribution.step))
        if isinstance(distribution, FloatDistribution):
            if distribution.step is None:
                raise ConfigurationError(
                    f"a grid has finitely many points, and {self.name} may be any number of "
                    f"{format_distribution(self)}: list its values, or give a step"
                )
            count = round((distribution.high - distribution.low) / distribution.step) + 1
            return [distribution.low + index * distribution.step for index in range(count)]
        return list(self.overrides)


@dataclass(frozen=True)
class Space:
    """What a sweep searches, and what all its trials have.

    Example:
        from fulgurite_sweeps import Space

        space = Space.parse(["steps=100", "lr=log(1e-5,1e-1)", "optimizer=adam,sgd"])
        space.fixed  # ("steps=100",)
        space.build_overrides({"lr": 0.01, "optimizer": "sgd"})

    Attributes:
        axes: what is searched, by name.
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
                several together.

        Raises:
            ConfigurationError: one of them has another form, or a path is set twice.
        """
        axes: dict[str, Axis] = {}
        fixed: list[str] = []
        paths: list[str] = []
        for argument in arguments:
            axis = _parse_axis(argument)
            if axis is None:
                fixed.append(argument)
                paths.append(split_override(argument)[0])
            else:
                axes[axis.name] = axis
                paths += axis.paths
        for path, count in Counter(paths).items():
            if count > 1:
                raise ConfigurationError(f"{path} is set twice: give all its values at once")
        return cls(axes, tuple(fixed))

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
        space = cls.parse(
            [*overrides, *(f"{name}={value}" for name, value in axes.items() if _is_text(value))]
        )
        others = {
            name: _make_axis(name, value) for name, value in axes.items() if not _is_text(value)
        }
        ordered = {name: (space.axes | others).get(name) for name in axes}
        return cls({name: axis for name, axis in ordered.items() if axis is not None}, space.fixed)

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Optuna's distributions by the names of the axes."""
        return {name: axis.distribution for name, axis in self.axes.items()}

    def build_overrides(self, values: Mapping[str, Any]) -> list[str]:
        """Return the overrides of a trial, those that all trials have first.

        Args:
            values: by the names of the axes.
        """
        changes = (axis.build_overrides(values[name]) for name, axis in self.axes.items())
        return [*self.fixed, *itertools.chain(*changes)]

    def list_points(self) -> list[dict[str, Any]]:
        """Return all points, those of the last axis next to each other.

        Raises:
            ConfigurationError: there are infinitely many.
        """
        values = [axis.list_values() for axis in self.axes.values()]
        return [dict(zip(self.axes, point, strict=True)) for point in itertools.product(*values)]

    def list_samples(self) -> list[dict[str, Any]]:
        """Return points that have each sample of each axis at least once."""
        samples = {name: axis.list_samples() for name, axis in self.axes.items()}
        count = max(map(len, samples.values()), default=1)
        return [
            {name: values[index % len(values)] for name, values in samples.items()}
            for index in range(count)
        ]

    def parse_point(self, text: str) -> dict[str, Any]:
        """Return a point that a user wants tried; what it leaves out, the sampler chooses.

        Args:
            text: strings `name=value` with spaces between them.

        Raises:
            ConfigurationError: an axis has no such value, or there is no such axis.
        """
        point = {}
        for item in text.split():
            name, _, value = item.partition("=")
            if name not in self.axes:
                raise ConfigurationError(
                    f"{item!r} cannot be tried first: nothing called {name!r} is searched. "
                    f"{did_you_mean(name, self.axes)}"
                )
            point[name] = self.axes[name].parse_value(value)
        return point

    def describe(self) -> dict[str, Any]:
        """Return the space as JSON, to compare it with that of an earlier start."""
        axes = {name: format_distribution(axis) for name, axis in self.axes.items()}
        return {"axes": axes, "fixed": list(self.fixed)}


def format_distribution(axis: Axis) -> str:
    """Return what is searched along an axis, as it is written on the command line."""
    distribution = axis.distribution
    if isinstance(distribution, CategoricalDistribution):
        return ",".join(axis.overrides)
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    form = "int" if isinstance(distribution, IntDistribution) else "float"
    arguments = [f"{distribution.low!r}", f"{distribution.high!r}"]
    if distribution.log:
        arguments.append("log")
    elif distribution.step not in (None, 1):
        arguments.append(f"step={distribution.step!r}")
    return f"{form}({','.join(arguments)})"


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _parse_axis(argument: str) -> Axis | None:
    """Return what an argument of the command line searches; None if it has a single value."""
    try:
        paths, text = split_axis(argument)
        call = parse_call(text) if len(paths) == 1 else None
        if call is not None and call.name in _NUMBERS:
            return Axis(paths[0], _parse_numbers(paths[0], call))
        points = list(expand_axes([argument]).values())
    except ConfigError as error:
        raise ConfigurationError(str(error)) from error
    if len(points) == 1 and len(paths) == 1:
        return None
    return _make_choices(",".join(paths), points)


def _make_choices(name: str, points: Sequence[tuple[str, ...]]) -> Axis:
    """Return an axis of choices, each called by the values that it sets.

    Args:
        name: of the axis.
        points: the overrides of each choice.
    """
    overrides = {}
    for point in points:
        values = [split_override(override)[1] for override in point]
        text = values[0] if len(values) == 1 else f"({','.join(values)})"
        overrides[text] = point
    return Axis(name, CategoricalDistribution(tuple(overrides)), overrides)


def _make_axis(name: str, value: Any) -> Axis:
    """Return an axis of a Python program.

    Args:
        name: of the axis.
        value: a distribution of Optuna, or a list of values.
    """
    if isinstance(value, FloatDistribution | IntDistribution):
        return Axis(name, value)
    if isinstance(value, CategoricalDistribution):
        value = value.choices
    if not isinstance(value, list | tuple) or not value:
        raise ConfigurationError(
            f"{name}: {value!r} cannot be searched: give a string such as 'log(1e-5,1e-1)', a list "
            "of values, or a distribution of Optuna"
        )
    return _make_choices(name, [(f"{name}={_format_choice(choice)}",) for choice in value])


def _format_choice(value: Any) -> str:
    """Return a value as the command line takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _parse_numbers(name: str, call: Call) -> BaseDistribution:
    """Return the distribution that `log(...)`, `float(...)` or `int(...)` writes.

    Args:
        name: of the axis.
        call: what was written.

    Raises:
        ConfigurationError: it has other arguments, or no number is in between.
    """
    flags = call.arguments[2:]
    if len(call.arguments) < 2 or flags not in ([], ["log"]) or call.keywords.keys() - {"step"}:
        raise ConfigurationError(f"{name}={_write(call)} is not a search space: write {FORMS}")
    number, make = _NUMBERS[call.name]
    low, high = (_convert(text, number, name) for text in call.arguments[:2])
    options: dict[str, Any] = {"log": call.name == "log" or bool(flags)}
    if "step" in call.keywords:
        options["step"] = _convert(call.keywords["step"], number, name)
    try:
        return make(low, high, **options)
    except ValueError as error:
        raise ConfigurationError(f"{name}={_write(call)} is not a search space: {error}") from error


def _write(call: Call) -> str:
    keywords = [f"{key}={value}" for key, value in call.keywords.items()]
    return f"{call.name}({','.join([*call.arguments, *keywords])})"


def _convert(text: str, number: type[int] | type[float], name: str) -> Any:
    """Return a number.

    Args:
        text: what was written.
        number: its type.
        name: of the axis, for the error.
    """
    try:
        return number(text)
    except ValueError as error:
        kind = "an integer" if number is int else "a number"
        raise ConfigurationError(f"{name}: {text!r} is not {kind}") from error


_NUMBERS: dict[str, tuple[Any, Any]] = {
    "log": (float, FloatDistribution),
    "float": (float, FloatDistribution),
    "int": (int, IntDistribution),
}
