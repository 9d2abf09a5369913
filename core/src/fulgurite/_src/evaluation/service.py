"""The evaluations and predictions of an engine: what runs them, built once for each kind."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import PyTree

from fulgurite._src.evaluation.evaluation import (
    Evaluation,
    EvaluationResult,
    MetricFunctions,
    ShouldStop,
)
from fulgurite._src.evaluation.prediction import PredictionRunner
from fulgurite._src.evaluation.runner import EvaluationRunner
from fulgurite._src.evaluation.target import EvalTarget, apply_module_view, as_eval_target
from fulgurite._src.evaluation.totals import EvaluationTotals
from fulgurite._src.execution.executables import CompilationQueue
from fulgurite._src.plugins.manager import PluginManager
from fulgurite._src.recent import RecentCache
from fulgurite._src.rng import make_root_key
from fulgurite._src.training.services import Services
from fulgurite._src.training.state import TrainState
from fulgurite._src.tree.specs import leaf_signature
from fulgurite.errors import ConfigurationError, PluginError, did_you_mean, error_context


class EvaluationService:
    """Evaluates models for an engine, each kind of evaluation by one runner.

    A model is a module, a pair of a module and its state, or a train state.

    Attributes:
        evaluations: the evaluations that plugins declared, by name.

    Args:
        services: what the engine provides.

    Raises:
        PluginError: two evaluations have one name, or one has that of training's records.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self.evaluations = _register_evaluations(services.plugins)
        self._runners = RecentCache[EvaluationRunner](16 + len(self.evaluations))
        self._prediction_runner: PredictionRunner | None = None

    def evaluate(self, model: Any, evaluation: Evaluation) -> dict[str, Any]:
        """Return the metrics of a model over one epoch of the evaluation's data."""
        target = self._as_target(model)
        num_batches = self._services.settings.limit_batches(evaluation.num_batches)
        runner = self._get_runner(evaluation)
        return runner.get_result(runner.evaluate(target, evaluation.data, num_batches)).metrics

    def add_to_totals(
        self, model: Any, evaluation: Evaluation, totals: EvaluationTotals | None
    ) -> EvaluationTotals:
        """Return the totals with those of a model over the evaluation's data.

        Args:
            model: the model.
            evaluation: of all the totals.
            totals: so far; None begins an evaluation.

        Raises:
            ConfigurationError: the totals are those of another kind of evaluation.
        """
        runner = self._get_runner(evaluation)
        if totals is not None and runner is not self._get_runner(totals.evaluation):
            raise ConfigurationError(
                f"evaluate_step of evaluation {evaluation.name!r} got totals of "
                f"{totals.evaluation.name!r}, or of other functions: give each evaluation totals "
                "of its own"
            )
        return runner.evaluate(self._as_target(model), evaluation.data, None, totals=totals)

    def predict(
        self,
        model: Any,
        evaluation: Evaluation,
        callback: Callable[[PyTree[np.ndarray]], None] | None,
    ) -> PyTree[np.ndarray]:
        """Return the predictions of a model for every example of the evaluation's data.

        Args:
            model: the model.
            evaluation: its data and number of batches are looked at.
            callback: called with the predictions of each batch instead; nothing is returned.
        """
        target = self._as_target(model)
        num_batches = self._services.settings.limit_batches(evaluation.num_batches)
        if self._prediction_runner is None:
            self._prediction_runner = PredictionRunner(self._services)
        return self._prediction_runner.predict(target, evaluation.data, num_batches, callback)

    def run_evaluation(
        self, name: str, state: TrainState, should_stop: ShouldStop
    ) -> EvaluationResult:
        """Return what an evaluation of a plugin gives for a state; the arguments are those of
        `Engine.run_evaluation`."""
        evaluation = self._get_evaluation(name)
        target = self._view_target(evaluation, state)
        num_batches = self._services.settings.limit_batches(evaluation.num_batches)
        runner = self._get_runner(evaluation)
        totals = runner.evaluate(target, evaluation.data, num_batches, should_stop)
        return runner.get_result(totals)

    def check_evaluations(self, state: TrainState, queue: CompilationQueue | None) -> None:
        """Trace the evaluations of plugins by shape, for a state.

        Args:
            state: to evaluate.
            queue: where they are to be compiled behind other work; None if they are not.
        """
        for name, evaluation in self.evaluations.items():
            if evaluation.check_at_start:
                with error_context(lambda name=name: f"evaluator {name!r}, before the first step"):
                    self._trace_metric_types(evaluation, state, queue)

    def get_metric_types(self, state: TrainState, source: str) -> dict[str, type]:
        """Return the class of each metric that a source of records gives, by name; the arguments
        are those of `Engine.get_metric_types`."""
        if source == "train":
            metrics = state.metric_window.values.by_name
            return {name: type(metric) for name, metric in metrics.items()}
        return self._trace_metric_types(self._get_evaluation(source), state)

    def _trace_metric_types(
        self, evaluation: Evaluation, state: TrainState, queue: CompilationQueue | None = None
    ) -> dict[str, type]:
        """Trace an evaluation by shape, and return the types of its metrics by name."""
        target = self._view_target(evaluation, state)
        num_batches = self._services.settings.limit_batches(evaluation.num_batches)
        runner = self._get_runner(evaluation)
        return runner.trace_metric_types(target, evaluation.data, num_batches, queue)

    def _as_target(self, model: Any) -> EvalTarget:
        return as_eval_target(model, make_root_key(self._services.settings.seed))

    def _view_target(self, evaluation: Evaluation, state: TrainState) -> EvalTarget:
        """Return a state as what an evaluation looks at, by the weights that it chooses."""
        state = apply_module_view(self._services.plugins, state, evaluation.module_view)
        return as_eval_target(state, state.key)

    def _get_runner(self, evaluation: Evaluation) -> EvaluationRunner:
        """Return what runs evaluations of this kind, built at its first use."""
        key = (
            evaluation.name,
            evaluation.new_rng_each_time,
            _sign_functions(evaluation.metrics),
            _sign_functions(evaluation.losses),
            _sign_functions(evaluation.summaries),
        )
        return self._runners.get_or_build(key, lambda: EvaluationRunner(self._services, evaluation))

    def _get_evaluation(self, name: str) -> Evaluation:
        if name not in self.evaluations:
            raise PluginError(
                f"no evaluator is called {name!r}. {did_you_mean(name, self.evaluations)}"
            )
        return self.evaluations[name]


def _register_evaluations(plugins: PluginManager) -> dict[str, Evaluation]:
    evaluations = plugins.hooks.register_evaluations.collect_by_name()
    if "train" in evaluations:
        raise PluginError(
            "an evaluator is called 'train', which is the source of training's records: rename it"
        )
    return evaluations


def _sign_functions(functions: MetricFunctions | None) -> tuple[Any, ...] | None:
    """Return a key of functions by name; None for those of the module."""
    if functions is None:
        return None
    return tuple((name, leaf_signature(function)) for name, function in functions.items())
