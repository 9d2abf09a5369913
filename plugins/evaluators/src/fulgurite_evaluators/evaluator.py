"""The plugin: a named evaluation and when it runs."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import fulgurite as fg
from fulgurite.data.sources import get_split
from fulgurite.errors import ConfigurationError
from fulgurite.triggers import as_trigger, is_exact

from fulgurite_evaluators.standalone import Standalone

Functions = Mapping[str, Callable[..., Any]]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(eq=False)
class Evaluator:
    """Evaluates the model on its own data, during training or in a separate process.

    The results become records of the source `name` and `result.metrics[name]`, and go to the hook
    `on_evaluate_end`.

    For another kind of evaluation, override `evaluate` in a subclass, or pass a function as `call`.

    Attributes:
        name: unique, and usable as a file name.
        data: any data source, or an object whose `evaluations[name]` is one; one epoch of it is
            evaluated.
        run: when: a trigger, an int for an interval in steps, or `EveryCheckpoint` or
            `LastCheckpoint` for an evaluation by `fulgurite evaluate`, which training ignores. An
            evaluation at step i sees exactly i updates.
        limit: use at most this many batches.
        metrics: by name, instead of those of the module's `validation_step`: `metric(preds, batch)`
            returns an array with an example axis, which is averaged, or `metric(preds, batch,
            mask)` a metric.
        losses: likewise, instead of the module's loss; `loss` is their sum.
        weights: `current`, or the name of a module that another plugin derives from the state, such
            as `averaged`.
        fresh: whether each evaluation draws different random numbers; by default all draw the same.
        required: whether an exception ends training; if not, the evaluator is left out from then
            on, with one notice and an entry in `result.failures`.
        group: the name of the process that runs a standalone evaluator; None for `default`.
        call: `call(state, step)` returns the metrics, instead of an evaluation of the module over
            `data`; see `evaluate`.
    """

    plugin_name: ClassVar[str] = "evaluator"

    name: str
    data: Any = None
    every: fg.Trigger | int | Standalone = field(default_factory=fg.AtEnd)
    num_batches: int | None = None
    metrics: Functions | None = None
    losses: Functions | None = None
    module_view: str = "current"
    new_rng_each_time: bool = False
    required: bool = True
    group: str | None = None
    fn: Callable[[fg.TrainState, int], dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        where = f"Evaluator({self.name!r})"
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name) or self.name == "train":
            raise ConfigurationError(
                f"{where}: a name is letters, digits and . _ - (it names files), and not 'train', which is training's"
            )
        if not isinstance(self.every, Standalone):
            self.every = as_trigger(self.every)
            if self.group is not None:
                raise ConfigurationError(
                    f"{where} runs during training, so its group {self.group!r} has no meaning: give it "
                    "run=EveryCheckpoint() or run=LastCheckpoint(), or no group"
                )
        elif self.group is None:
            self.group = "default"
        elif not isinstance(self.group, str) or not _NAME.fullmatch(self.group):
            raise ConfigurationError(
                f"{where}: group {self.group!r} is not letters, digits and . _ - (it names files)"
            )
        if self.data is None and self.fn is None and not self._custom:
            raise ConfigurationError(f"{where} has nothing to evaluate: give it data, or call=")
        if self.num_batches is not None and (
            type(self.num_batches) is not int or self.num_batches < 1
        ):
            raise ConfigurationError(
                f"{where}: limit is {self.num_batches!r}; it is a number of batches, at least one"
            )
        if self.fn is not None and not callable(self.fn):
            raise ConfigurationError(
                f"{where}: call is {self.fn!r}; give a function of the state and the step"
            )
        if not isinstance(self.module_view, str):
            raise ConfigurationError(
                f"{where}: weights is {self.module_view!r}; it is 'current' or the name of others"
            )

    @property
    def instance(self) -> str:
        """What distinguishes it from other evaluators."""
        return self.name

    def evaluate(self, state: fg.TrainState, step: int) -> dict[str, Any]:
        """The metrics by name: numbers, arrays, or dictionaries of these. Any `fg.media` among
        them, or functions that make them, are shown. Subclasses override it.

        `state.module` has the chosen weights and is in inference mode. Copy the state's arrays only
        to keep them for longer than the call.
        """
        return self._standard(state) if self.fn is None else self.fn(state, step)

    @fg.hookimpl
    def register_evaluators(self) -> list[fg.EvaluatorSpec]:
        """What is evaluated, for the engine."""
        return [
            fg.EvaluatorSpec(
                self.name,
                self.data if self.data is None else get_split(self.data, "evaluations", self.name),
                self.num_batches,
                self.module_view,
                self.metrics,
                self.losses,
                self.new_rng_each_time,
                exact=isinstance(self.every, fg.Trigger) and is_exact(self.every),
                raise_on_error=self.required,
                custom=self._evaluated if self._custom else None,
            )
        ]

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """When it is evaluated; never along training if it is standalone."""
        if isinstance(self.every, Standalone):
            return []
        return [fg.ScheduledAction("evaluate", self.every, self._run, "evaluate")]

    @property
    def _custom(self) -> bool:
        return self.fn is not None or type(self).evaluate is not Evaluator.evaluate

    def _run(self, run: fg.Run) -> None:
        run.evaluate(self.name)

    def _evaluated(
        self, state: fg.TrainState, step: int, standard: Callable[[fg.TrainState], dict[str, Any]]
    ) -> dict[str, Any]:
        # What `super().evaluate` in a subclass does.
        self._standard = standard
        return self.evaluate(state, step)
