"""The plugin: a named evaluation and when it runs."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import fulgurite as fg
from fulgurite.errors import (
    ConfigurationError,
    EvaluationInterrupted,
    StateError,
    check_callable,
    error_context,
)
from fulgurite.plugins import (
    EngineView,
    EvaluationResult,
    MetricFunctions,
    as_trigger,
    get_split,
    hide_constructor_frames,
    hint_at_class_arguments,
    is_exact,
)

from fulgurite_evaluators.custom import share_failure, split_values
from fulgurite_evaluators.standalone import Standalone

EvaluateState = Callable[[fg.TrainState], dict[str, Any]]
RunEvaluator = Callable[[str, fg.TrainState], EvaluationResult]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@hide_constructor_frames
@hint_at_class_arguments(
    {
        "callbacks": "loggers and other plugins belong to the engine, fg.Engine(plugins=[...])",
        "ds": "give the data as the second argument, Evaluator('val', data)",
        "dataset": "give the data as the second argument, Evaluator('val', data)",
        "job_group": "give group=",
        "run": "give every=, such as every=100 or every=EveryCheckpoint()",
        "steps": "give num_batches= for how much is evaluated, every= for when",
    }
)
@dataclass(eq=False)
class Evaluator(fg.Plugin):
    """Evaluates the model on its own data, during training or in a separate process.

    The results become records of the source `name` and `result.metrics[name]`, and go to the hook
    `on_evaluate_end`. For another kind of evaluation, override `evaluate` in a subclass, or pass a
    function as `fn`.

    Example:
        from fulgurite_evaluators import Evaluator, EveryCheckpoint

        test = Evaluator("test", data, every=100)
        slow = Evaluator("slow", data, every=EveryCheckpoint(), group="side")
        engine = fg.Engine(steps=1000, plugins=[test, slow])

    Attributes:
        name: unique, and usable as a file name.
        data: any data source, or an object whose `evaluations[name]` is one; one epoch of it is
            evaluated.
        every: a trigger, an int for an interval in steps, or `EveryCheckpoint` or `LastCheckpoint`
            for an evaluation by `fulgurite evaluate`, which training ignores. An evaluation at step
            i sees exactly i updates.
        num_batches: use at most this many batches.
        metrics: by name, instead of those of the module's `validation_step`: `metric(preds, batch)`
            returns an array with an example axis, which is averaged, or `metric(preds, batch,
            mask)` a metric.
        losses: likewise, instead of the module's loss; `loss` is their sum.
        summaries: likewise, what is shown of the first batch, instead of the media of the step and
            of plugins; `summary(preds, batch)` returns media of `fulgurite_logging.media`.
        module_view: `current`, or the name of a module that another plugin derives from the state,
            such as `averaged`.
        new_rng_each_time: whether each evaluation draws different random numbers; by default all
            draw the same.
        raise_on_error: whether an exception ends training; if not, the evaluator is left out from
            then on, with one notice and an entry in `result.failures`.
        group: the name of the process that runs a standalone evaluator; None for `default`.
        fn: `fn(state, step)` returns the metrics, instead of an evaluation of the module over
            `data`; see `evaluate`.
    """

    plugin_name = "evaluator"

    name: str
    data: Any = None
    every: fg.Trigger | int | Standalone = field(default_factory=fg.AtEnd)
    num_batches: int | None = None
    metrics: MetricFunctions | None = None
    losses: MetricFunctions | None = None
    summaries: MetricFunctions | None = None
    module_view: str = "current"
    new_rng_each_time: bool = False
    raise_on_error: bool = True
    group: str | None = None
    fn: Callable[[fg.TrainState, int], dict[str, Any]] | None = None
    # Set while a custom evaluation runs.
    _evaluate_standard: EvaluateState | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        where = f"Evaluator({self.name!r})"
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name) or self.name == "train":
            raise ConfigurationError(
                f"{where}: a name is letters, digits and . _ - (it names files), and not 'train', "
                "which is training's"
            )
        if not isinstance(self.every, Standalone):
            self.every = as_trigger(self.every)
            if self.group is not None:
                raise ConfigurationError(
                    f"{where} runs during training, so its group {self.group!r} has no meaning: "
                    "give it every=EveryCheckpoint() or every=LastCheckpoint(), or no group"
                )
        elif self.group is None:
            self.group = "default"
        elif not isinstance(self.group, str) or not _NAME.fullmatch(self.group):
            raise ConfigurationError(
                f"{where}: group {self.group!r} is not letters, digits and . _ - (it names files)"
            )
        if self.fn is not None:
            check_callable(self.fn, f"{where}: fn")
            for name in ("metrics", "losses", "summaries"):
                if getattr(self, name) is not None:
                    raise ConfigurationError(
                        f"{where}: {name} are of an evaluation of the module, and fn replaces it: "
                        "return them from fn, or leave it out"
                    )
        if self.data is None and not self._is_custom:
            raise ConfigurationError(f"{where} has nothing to evaluate: give it data, or fn=")
        # What the core's evaluator refuses is refused here already, not first in an engine.
        self._build_core_evaluator(self.data, self.module_view)

    @property
    def instance(self) -> str:
        """The name, by which the engine tells evaluators apart."""
        return self.name

    def evaluate(self, state: fg.TrainState, step: int) -> dict[str, Any]:
        """Return the metrics by name: numbers, arrays, or dictionaries of these.

        Any media among them, or functions that make them, are shown. Subclasses override it;
        `super().evaluate(state, step)` is the evaluation of the module over the data.

        Args:
            state: the train state, whose `module` has the chosen weights and is in inference mode.
                Copy its arrays only to keep them for longer than the call.
            step: the number of updates so far.
        """
        if self.fn is not None:
            return self.fn(state, step)
        if self._evaluate_standard is None:
            raise StateError(
                f"evaluator {self.name!r}: evaluate(state, step) is called during an evaluation "
                "only; call engine.evaluate(state, data) instead"
            )
        return self._evaluate_standard(state)

    def compute(
        self, state: fg.TrainState, engine: EngineView, run_evaluation: RunEvaluator
    ) -> EvaluationResult:
        """Return what the evaluation gives for a state, without reporting it.

        Args:
            state: the train state; `module_view` chooses its weights.
            engine: the engine that has this plugin.
            run_evaluation: runs the standard evaluation: `engine.run_evaluation`, or
                `run.run_evaluation` during training.

        Raises:
            EvaluationInterrupted: training is to stop.
        """
        if not self._is_custom:
            return run_evaluation(self.name, state)
        media: dict[str, Any] = {}

        def evaluate_standard(state: fg.TrainState) -> dict[str, Any]:
            if self.data is None:
                raise ConfigurationError(
                    f"evaluator {self.name!r} has no data to evaluate the module on: give it data, "
                    "or do without super().evaluate"
                )
            result = run_evaluation(self.name, state)
            media.update(result.media)
            return result.metrics

        view = engine.apply_module_view(state, self.module_view)
        self._evaluate_standard = evaluate_standard
        try:
            with fg.training_mode(False, view.module) as module, share_failure(engine.sharding):
                values = self.evaluate(view.replace(module=module), int(state.step))
        finally:
            self._evaluate_standard = None
        result = split_values(self.name, values)
        return EvaluationResult(result.metrics, {**media, **result.media})

    @fg.hookimpl
    def register_evaluations(self) -> list[fg.Evaluation]:
        """Return the standard evaluation, if there is data for it."""
        if self.data is None:
            return []
        data = get_split(self.data, "evaluations", self.name)
        # `compute` gives a custom evaluation the weights that it asks for.
        module_view = "current" if self._is_custom else self.module_view
        return [self._build_core_evaluator(data, module_view)]

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Return when it runs during training: never if it is standalone."""
        if isinstance(self.every, Standalone):
            return []
        return [fg.ScheduledAction("evaluate", self.every, self._run, "evaluate")]

    @property
    def _is_custom(self) -> bool:
        return self.fn is not None or type(self).evaluate is not Evaluator.evaluate

    def _build_core_evaluator(self, data: Any, module_view: str) -> fg.Evaluation:
        return fg.Evaluation(
            self.name,
            data,
            num_batches=self.num_batches,
            module_view=module_view,
            metrics=self.metrics,
            losses=self.losses,
            summaries=self.summaries,
            new_rng_each_time=self.new_rng_each_time,
            exact=isinstance(self.every, fg.Trigger) and is_exact(self.every),
            check_at_start=(
                self.raise_on_error
                and not self._is_custom
                # Another process evaluates.
                and not isinstance(self.every, Standalone)
            ),
        )

    def _run(self, run: fg.Run) -> None:
        """Evaluate and report; a failure that may be is noted, and nothing runs from then on."""
        failure_name = f"evaluate.{self.name}"
        if failure_name in run.failures:
            return
        # Outside of the `try`: a state that is not finite is not a failure of the evaluator.
        state = run.state
        try:
            with (
                run.timings.time(failure_name),
                error_context(lambda: f"evaluator {self.name!r}, step {run.step}"),
            ):
                result = self.compute(state, run.engine, run.run_evaluation)
        except EvaluationInterrupted:
            raise
        except Exception as error:
            if self.raise_on_error:
                raise
            run.forget_metrics(self.name)
            run.report_failure(
                failure_name, f"evaluator {self.name!r} failed and runs no more", error
            )
            return
        run.report_evaluation(self.name, result.metrics, result.media)


def find_evaluators(engine: fg.Engine) -> dict[str, Evaluator]:
    """Return the evaluators among the plugins of an engine, by name."""
    plugins = [registered.plugin for registered in engine.plugins.plugins.values()]
    return {plugin.name: plugin for plugin in plugins if isinstance(plugin, Evaluator)}
