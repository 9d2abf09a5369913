"""The best checkpoint by a comparison of the program's own."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fulgurite.errors import ConfigurationError, check_callable, error_context

from fulgurite_checkpoint.format import Entry, find_recorded_best

Metrics = Mapping[str, Mapping[str, Any]]
Better = Callable[[Metrics, Metrics], bool]
"""Says of the metrics of two checkpoints, each by source, whether the first are better."""


@dataclass(frozen=True)
class Comparison:
    """Chooses among checkpoints by a function.

    A function may prefer C to A but not to B, although it does not prefer B to A either. Of such
    checkpoints the best depends on those that have been removed. So each records the best so far,
    with which a run that resumes continues, and which is read without the function.

    Attributes:
        better: the function.
        metric: `SOURCE/NAME`; a checkpoint in which it is not a finite number is never the best.
    """

    better: Better
    metric: str

    @property
    def name(self) -> str:
        """That of the function, which is recorded."""
        return str(getattr(self.better, "__qualname__", type(self.better).__qualname__))

    def find_best(self, entries: Iterable[Entry]) -> Entry | None:
        """Return the best of some checkpoints: the recorded one, if this comparison recorded it.

        Args:
            entries: the checkpoints, oldest first.
        """
        complete = [entry for entry in entries if entry.commit]
        newest = complete[-1].commit if complete else None
        if newest is not None and newest.better == self.name:
            return find_recorded_best(complete)
        best = None
        for entry in complete:
            if self.is_better(entry, best):
                best = entry
        return best

    def is_better(self, entry: Entry, best: Entry | None) -> bool:
        """Return whether a checkpoint is better than the best one so far.

        Args:
            entry: the checkpoint.
            best: the best one; None before the first.

        Raises:
            ConfigurationError: the function calls metrics better than themselves.
        """
        if entry.commit is None or entry.get_metric(self.metric) is None:
            return False
        metrics = entry.commit.metrics
        if best is not None and best.commit is not None:
            return self._call(metrics, best.commit.metrics)
        if self._call(metrics, metrics):
            raise ConfigurationError(
                f"Checkpointer: better={self.name} says that the metrics of step {entry.step} are "
                "better than themselves: compare by > or <, not by >= or <="
            )
        return True

    def _call(self, metrics: Metrics, best: Metrics) -> bool:
        with error_context(
            lambda: (
                f"Checkpointer: better={self.name} gets the metrics of two checkpoints, such as "
                f"{self.metric.partition('/')[2]!r} in metrics[{self.metric.partition('/')[0]!r}]"
            )
        ):
            return bool(self.better(metrics, best))


def make_comparison(better: Any, monitor: str | None, mode: str | None) -> Comparison | None:
    """Return the comparison that the arguments of a `Checkpointer` ask for; None for that by mode.

    Args:
        better: the function, or None.
        monitor: `SOURCE/NAME`, or None.
        mode: `min`, `max` or None.

    Raises:
        ConfigurationError: the arguments do not go together.
    """
    if better is None:
        return None
    check_callable(better, "Checkpointer: better")
    if mode is not None:
        raise ConfigurationError(f"Checkpointer: better replaces mode={mode!r}: give one of them")
    if monitor is None:
        raise ConfigurationError(
            "Checkpointer: better compares checkpoints in which a metric was measured: name it, "
            "such as monitor='test/loss'"
        )
    return Comparison(better, monitor)
