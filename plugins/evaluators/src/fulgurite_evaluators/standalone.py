"""When a standalone evaluator runs: triggers on checkpoints, for a process of its own."""

from dataclasses import dataclass

from fulgurite.errors import ConfigurationError


@dataclass(frozen=True)
class Standalone:
    """The base of what makes an evaluator standalone: training ignores it, `fulgurite evaluate
    --group` runs it.

    Attributes:
        poll: seconds between two looks at the run's directory.
    """

    poll: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.poll, int | float) or not 0 < self.poll < float("inf"):
            raise ConfigurationError(
                f"{type(self).__name__}: poll is {self.poll!r}; it must be a positive number"
            )


@dataclass(frozen=True)
class EveryCheckpoint(Standalone):
    """The newest checkpoint, whenever there is a new one; some may be skipped, the last one
    never."""


@dataclass(frozen=True)
class LastCheckpoint(Standalone):
    """The last checkpoint of a run that has reached its planned end."""
