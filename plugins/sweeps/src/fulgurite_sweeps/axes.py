"""The axes of a search space: arguments of a program, and the values that a trial may give."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import optuna
from fulgurite.errors import ConfigurationError, did_you_mean
from fulgurite_config import ConfigError, expand_axes, split_axis, split_override
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
    json_to_distribution,
)

from fulgurite_sweeps.calls import Call, parse_call

FORMS = (
    "log(low,high), float(low,high), float(low,high,step=S), int(low,high), int(low,high,log) or "
    "int(low,high,step=S)"
)
"""How numbers are searched, for errors."""
_CONDITION = re.compile(r"(.*\S)\s+if\s+([\w.,]+\s*=.*\S)\s*", re.DOTALL)


@dataclass(frozen=True)
class Condition:
    """When an axis is searched: if another one has one of some values.

    Attributes:
        name: of the other axis.
        values: of it.
    """

    name: str
    values: tuple[Any, ...]

    def __str__(self) -> str:
        """Return it as it is written on the command line."""
        return f"{self.name}={','.join(map(str, self.values))}"


@dataclass(frozen=True)
class Axis:
    """What is searched together: one argument of a program, or several that change together.

    Attributes:
        name: the path of the argument in the program's configuration, or several with commas.
        distribution: Optuna's, of numbers or of choices, which are strings.
        overrides: what each choice sets; empty for numbers.
        condition: when it is searched; None for always.
    """

    name: str
    distribution: BaseDistribution
    overrides: dict[str, tuple[str, ...]] = field(default_factory=dict)
    condition: Condition | None = None

    def is_active(self, point: Mapping[str, Any]) -> bool:
        """Return whether a trial has a value of this axis.

        Args:
            point: its values of the axes before.
        """
        if self.condition is None:
            return True
        return point.get(self.condition.name) in self.condition.values

    def suggest(self, trial: optuna.Trial) -> Any:
        """Return the value that the sampler chooses.

        Args:
            trial: for which it does.
        """
        distribution = self.distribution
        if isinstance(distribution, CategoricalDistribution):
            return trial.suggest_categorical(self.name, distribution.choices)
        assert isinstance(distribution, FloatDistribution | IntDistribution)
        limits: dict[str, Any] = {"low": distribution.low, "high": distribution.high}
        limits |= {"step": distribution.step, "log": distribution.log}
        if isinstance(distribution, IntDistribution):
            return trial.suggest_int(self.name, **limits)
        return trial.suggest_float(self.name, **limits)

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
        if not _is_in(value, self.distribution):
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
            low, high, step = distribution.low, distribution.high, distribution.step
            count = round((high - low) / step) + 1
            # Rounding may take the last one above the largest: 3 * 0.1 is 0.30000000000000004.
            return [min(low + index * step, high) for index in range(count)]
        return list(self.overrides)

    def describe(self) -> dict[str, Any]:
        """Return the axis as JSON, which `read_axis` reads."""
        condition = self.condition
        return {
            "name": self.name,
            "distribution": json.loads(distribution_to_json(self.distribution)),
            "overrides": {choice: list(point) for choice, point in self.overrides.items()},
            "condition": None if condition is None else [condition.name, list(condition.values)],
        }


def read_axis(description: Mapping[str, Any]) -> Axis:
    """Return an axis.

    Args:
        description: as `Axis.describe` returns it.
    """
    condition = description["condition"]
    return Axis(
        description["name"],
        json_to_distribution(json.dumps(description["distribution"])),
        {choice: tuple(point) for choice, point in description["overrides"].items()},
        None if condition is None else Condition(condition[0], tuple(condition[1])),
    )


def format_axis(axis: Axis) -> str:
    """Return what is searched along an axis, and when, as it is written on the command line."""
    condition = "" if axis.condition is None else f" if {axis.condition}"
    return f"{format_distribution(axis)}{condition}"


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
    elif distribution.step is not None and (form == "float" or distribution.step != 1):
        arguments.append(f"step={distribution.step!r}")
    return f"{form}({','.join(arguments)})"


def parse_axis(argument: str, axes: Mapping[str, Axis]) -> Axis | None:
    """Return what an argument of the command line searches; None if all trials have the same value.

    Args:
        argument: `path=SPACE`, or `path=SPACE if other=VALUE`.
        axes: those before it, which a condition may name.

    Raises:
        ConfigurationError: it has another form.
    """
    text, condition = _split_condition(argument)
    axis = _parse_unconditional(text, is_axis=condition is not None)
    if axis is None or condition is None:
        return axis
    return replace(axis, condition=_parse_condition(condition, axis.name, axes))


def _split_condition(argument: str) -> tuple[str, str | None]:
    """Return what stands before and behind `if`; what stands in quotes is a value."""
    match = _CONDITION.fullmatch(argument)
    if match is None or any(match[1].count(quote) % 2 for quote in "'\""):
        return argument, None
    return match[1], match[2]


def _parse_condition(text: str, name: str, axes: Mapping[str, Axis]) -> Condition:
    """Return when an axis is searched.

    Args:
        text: `other=VALUE`, or several values with commas.
        name: of the axis.
        axes: those before it.
    """
    other, _, values = (part.strip() for part in text.partition("="))
    if other not in axes:
        raise ConfigurationError(
            f"{name} is searched if {text}, and nothing called {other!r} is searched before it. "
            f"{did_you_mean(other, axes)}"
        )
    axis = axes[other]
    if isinstance(axis.distribution, FloatDistribution):
        raise ConfigurationError(
            f"{name} is searched if {text}, and {other} may be any number: a condition names an "
            "argument that has listed values, or integers"
        )
    if values in axis.overrides:
        return Condition(other, (values,))
    try:
        points = expand_axes([f"{axis.paths[0]}={values}"]).values()
    except ConfigError as error:
        raise ConfigurationError(str(error)) from error
    texts = [split_override(override)[1] for (override,) in points]
    return Condition(other, tuple(axis.parse_value(text) for text in texts))


def _parse_unconditional(argument: str, *, is_axis: bool) -> Axis | None:
    """Return what an argument searches, without its condition.

    Args:
        argument: `path=SPACE`.
        is_axis: whether a single value is an axis, too.
    """
    try:
        paths, text = split_axis(argument)
        call = parse_call(text) if len(paths) == 1 else None
        if call is not None and call.name in _NUMBERS:
            return Axis(paths[0], _parse_numbers(paths[0], call))
        if call is not None and call.name in _ELSEWHERE:
            raise ConfigurationError(
                f"{argument} is not a search space: write {_ELSEWHERE[call.name]}"
            )
        points = list(expand_axes([argument]).values())
    except ConfigError as error:
        raise ConfigurationError(str(error)) from error
    if len(points) == 1 and len(paths) == 1 and not is_axis:
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


def make_axis(name: str, value: Any) -> Axis:
    """Return an axis of a Python program.

    Args:
        name: of the axis.
        value: a distribution of Optuna, or a list of values.
    """
    if isinstance(value, FloatDistribution | IntDistribution):
        _check_finite(name, value.low, value.high)
        return Axis(name, value)
    if isinstance(value, CategoricalDistribution):
        value = value.choices
    if not isinstance(value, list | tuple) or not value:
        raise ConfigurationError(
            f"{name}: {value!r} cannot be searched: give a string such as 'log(1e-5,1e-1)', a list "
            "of values, or a distribution of Optuna"
        )
    return _make_choices(name, [(f"{name}={format_value(choice)}",) for choice in value])


def format_value(value: Any) -> str:
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
    _check_finite(name, low, high)
    options: dict[str, Any] = {"log": call.name == "log" or bool(flags)}
    if "step" in call.keywords:
        options["step"] = _convert(call.keywords["step"], number, name)
    try:
        return make(low, high, **options)
    except ValueError as error:
        raise ConfigurationError(f"{name}={_write(call)} is not a search space: {error}") from error


def _check_finite(name: str, low: float, high: float) -> None:
    """Raise an error unless both ends of what is searched are finite.

    Args:
        name: of the axis.
        low: the smallest number.
        high: the largest.
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ConfigurationError(
            f"{name} is searched between {low} and {high}: both must be finite numbers"
        )


def _is_in(value: float, distribution: FloatDistribution | IntDistribution) -> bool:
    """Return whether a distribution has a number: between its ends, and on a step if it has any."""
    if not distribution.low <= value <= distribution.high:
        return False
    if distribution.step is None:
        return True
    num_steps = (value - distribution.low) / distribution.step
    return abs(num_steps - round(num_steps)) < 1e-8


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


_ELSEWHERE = {
    "uniform": "float(low,high)",
    "quniform": "float(low,high,step=S)",
    "loguniform": "log(low,high)",
    "log_uniform": "log(low,high)",
    "randint": "int(low,high), whose high is included",
    "lograndint": "int(low,high,log), whose high is included",
    "choice": "the values with commas between them, name=a,b",
    "categorical": "the values with commas between them, name=a,b",
}
"""What other libraries call a search space, and how it is written here."""
_NUMBERS: dict[str, tuple[Any, Any]] = {
    "log": (float, FloatDistribution),
    "float": (float, FloatDistribution),
    "int": (int, IntDistribution),
}
