"""What a sweep looks for: the smallest or largest value of a metric, within bounds of others."""

import math
import re
from typing import Literal, NamedTuple, cast

from fulgurite.errors import ConfigurationError
from fulgurite.metrics import Mode, find_mode

Direction = Literal["minimize", "maximize"]
_BOUND = re.compile(r"\s*(.*?)\s*(<=|>=)\s*(.*?)\s*", re.DOTALL)


class Objective(NamedTuple):
    """A metric, and whether its smallest or its largest value is the best.

    Example:
        from fulgurite_sweeps import Objective

        Objective.parse("test/accuracy")  # Objective("test/accuracy", "maximize")

    Attributes:
        metric: `SOURCE/NAME`, such as `test/loss`; the newest value at the end of a trial counts.
        direction: `minimize` or `maximize`.
    """

    metric: str
    direction: Direction

    @classmethod
    def parse(cls, metric: str, mode: Mode | None = None) -> "Objective":
        """Return an objective.

        Args:
            metric: `SOURCE/NAME`.
            mode: `min` or `max`; None to tell it from the name.

        Raises:
            ConfigurationError: the name has no source, or does not tell which values are better.
        """
        _check_metric(metric)
        mode = mode or find_mode(metric)
        if mode is None:
            raise ConfigurationError(
                f"is a larger or a smaller {metric!r} better? Its name does not tell: add "
                "--maximize or --minimize behind it"
            )
        return cls(metric, cast(Direction, f"{mode}imize"))


class Constraint(NamedTuple):
    """A bound that a trial must keep to: one that does not is never the best.

    Example:
        from fulgurite_sweeps import Constraint

        Constraint.parse("test/loss<=0.5")  # Constraint("test/loss", "<=", 0.5)

    Attributes:
        metric: `SOURCE/NAME`; the newest value at the end of a trial counts.
        sign: `<=` or `>=`.
        bound: a finite number.
    """

    metric: str
    sign: Literal["<=", ">="]
    bound: float

    @classmethod
    def parse(cls, text: str) -> "Constraint":
        """Return a constraint.

        Args:
            text: `SOURCE/NAME<=NUMBER` or `SOURCE/NAME>=NUMBER`.

        Raises:
            ConfigurationError: it has another form.
        """
        match = _BOUND.fullmatch(text)
        try:
            bound = math.nan if match is None else float(match[3])
        except ValueError:
            bound = math.nan
        if match is None or not math.isfinite(bound):
            raise ConfigurationError(
                f"{text!r} is not a constraint: write SOURCE/NAME<=NUMBER or SOURCE/NAME>=NUMBER"
            )
        _check_metric(match[1])
        return cls(match[1], cast(Literal["<=", ">="], match[2]), bound)

    def measure_excess(self, value: float) -> float:
        """Return by how much a value is beyond the bound; 0 or less if it is not.

        Args:
            value: of the metric, and not NaN.
        """
        return value - self.bound if self.sign == "<=" else self.bound - value

    def __str__(self) -> str:
        """Return it as it is written on the command line."""
        return f"{self.metric}{self.sign}{self.bound!r}"


def _check_metric(metric: str) -> None:
    if "/" not in metric:
        raise ConfigurationError(
            f"the metric is {metric!r}; write SOURCE/NAME, as in test/accuracy"
        )
