"""When a standalone evaluator runs: triggers on checkpoints, for a process of its own."""

from dataclasses import dataclass

from fulgurite.errors import ConfigurationError
from fulgurite.plugins import hide_constructor_frames, hint_at_class_arguments

_HINTS = {
    **dict.fromkeys(
        ("group", "job_group"), "give it to the evaluator, Evaluator('slow', data, group='side')"
    ),
    "job_params": "they are a profile of fulgurite launch --profile NAME",
}


@dataclass(frozen=True)
class Standalone:
    """Base of what makes an evaluator standalone: training ignores it, and
    `fulgurite evaluate --group` runs it.

    Attributes:
        poll: seconds between two looks at the run's directory.
    """

    poll: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.poll, int | float) or not 0 < self.poll < float("inf"):
            raise ConfigurationError(
                f"{type(self).__name__}: poll is {self.poll!r}; it must be a positive number"
            )


@hide_constructor_frames
@hint_at_class_arguments(_HINTS)
@dataclass(frozen=True)
class EveryCheckpoint(Standalone):
    """Runs on the newest checkpoint, whenever there is a new one; some may be skipped, the last one
    never.

    Example:
        from fulgurite_evaluators import Evaluator, EveryCheckpoint

        evaluator = Evaluator("test", data, every=EveryCheckpoint(poll=10.0))
    """


@hide_constructor_frames
@hint_at_class_arguments(_HINTS)
@dataclass(frozen=True)
class LastCheckpoint(Standalone):
    """Runs on the last checkpoint of a run that has reached its planned end.

    Example:
        from fulgurite_evaluators import Evaluator, LastCheckpoint

        evaluator = Evaluator("final", data, every=LastCheckpoint())
    """
