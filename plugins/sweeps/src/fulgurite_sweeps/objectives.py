"""What a sweep looks for: the smallest or the largest value of a metric."""

from typing import Literal, NamedTuple, cast

from fulgurite.errors import ConfigurationError
from fulgurite.metrics import Mode, find_mode

Direction = Literal["minimize", "maximize"]


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
        if "/" not in metric:
            raise ConfigurationError(
                f"the metric is {metric!r}; write SOURCE/NAME, as in test/accuracy"
            )
        mode = mode or find_mode(metric)
        if mode is None:
            raise ConfigurationError(
                f"is a larger or a smaller {metric!r} better? Its name does not tell: add "
                "--maximize or --minimize behind it"
            )
        return cls(metric, cast(Direction, f"{mode}imize"))
