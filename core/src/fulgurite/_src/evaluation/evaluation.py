"""What a plugin declares as an evaluation, and what one gives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fulgurite._src.tracebacks import hide_constructor_frames
from fulgurite.errors import (
    ConfigurationError,
    check_name,
    check_positive_int,
    set_ints,
)

MetricFunctions = Mapping[str, Callable[..., Any]]
"""Functions of predictions and batch, by the name of the metric, loss or summary."""
ShouldStop = Callable[[], bool]
"""Asked before each batch of an evaluation; True gives the evaluation up."""


@hide_constructor_frames
@dataclass(frozen=True, eq=False)
class Evaluation:
    """A named evaluation, declared by a plugin in `register_evaluations`.

    Example:
        class TestSet:
            @fg.hookimpl
            def register_evaluations(self):
                return [fg.Evaluation("test", data)]


        engine = fg.Engine(steps=100, plugins=[TestSet()])

    Attributes:
        name: its results are `metrics[name]` and records of the source `name`.
        data: any data source; one epoch of it is evaluated.
        num_batches: use at most this many batches.
        module_view: `current`, or the name of a plugin's module view.
        metrics: used instead of those of the module's step, by name: `metric(preds, batch)` returns
            an array with an example axis, or `metric(preds, batch, mask)` a `Metric` or
            `CollectingMetric`; the step must return `preds`.
        losses: likewise, used instead of the loss and its terms; `loss` is their sum.
        summaries: likewise, what is shown of the first batch, instead of the media of the step and
            of plugins: `summary(preds, batch)` or `summary(preds, batch, mask)` returns media.
        new_rng_each_time: whether each evaluation draws different random numbers; by default all
            draw the same.
        exact: whether its results are exact records; False for one that runs by the clock.
        check_at_start: whether its step is traced by shape, on its first batch, before training
            begins, so that a mistake in it is not a surprise hours later. False where a failure is
            no reason not to train, or where the step may never be run.
    """

    name: str
    data: Any
    num_batches: int | None = None
    module_view: str = "current"
    metrics: MetricFunctions | None = None
    losses: MetricFunctions | None = None
    summaries: MetricFunctions | None = None
    new_rng_each_time: bool = False
    exact: bool = True
    check_at_start: bool = True

    def __post_init__(self) -> None:
        check_name(self.name, "Evaluation: name")
        where = f"evaluator {self.name!r}"
        set_ints(self, "num_batches")
        if self.num_batches is not None:
            check_positive_int(self.num_batches, f"{where}: num_batches")
        check_name(self.module_view, f"{where}: module_view")
        _check_functions(f"{where}: metrics", self.metrics)
        _check_functions(f"{where}: losses", self.losses)
        _check_functions(f"{where}: summaries", self.summaries)


@dataclass(frozen=True, eq=False)
class EvaluationResult:
    """What an evaluation gives.

    Example:
        from fulgurite.plugins import EvaluationResult

        result = EvaluationResult(metrics={"accuracy": 0.9}, media={})
        result.metrics["accuracy"]  # 0.9

    Attributes:
        metrics: Python numbers and NumPy arrays by name.
        media: what the step showed of the first batch, by name, on the device.
    """

    metrics: dict[str, Any]
    media: dict[str, Any]


def never_stop() -> bool:
    """Return False: the evaluation continues to its end."""
    return False


def _check_functions(where: str, functions: Any) -> None:
    """Raise a `ConfigurationError` for what is neither None nor functions by name."""
    if functions is None:
        return
    if not isinstance(functions, Mapping) or not all(map(callable, functions.values())):
        raise ConfigurationError(f"{where} must be a dictionary of functions, not {functions!r}")
