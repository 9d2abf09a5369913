"""What a decision by a metric needs of it: a value that was measured at the step of the decision,
and the weights that were measured.

A value of an earlier step would be taken for one of this step, and the weights of this step for
those that it is of. So it is refused, where possible before the first step.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from fulgurite._src.fit.actions import ActionStage
from fulgurite._src.fit.engine_view import EngineView
from fulgurite._src.fit.lambda_plugin import LambdaPlugin
from fulgurite._src.fit.run import Run
from fulgurite._src.plugins.selection import RegisteredPlugin
from fulgurite._src.triggers import StepRange, Trigger, is_exact
from fulgurite.errors import ConfigurationError, did_you_mean

# How many decisions are looked at before the first step. Triggers repeat: one that counts steps
# meets another one at its first step, or at none of a few, unless both are lists of steps.
_NUM_DECISIONS = 1000
# What the engine measures besides the metrics of the steps.
_ENGINE_METRICS = {"skipped_steps", "steps_per_second"}


def get_decision_stage(monitor: str) -> ActionStage:
    """Return the stage in which an action decides by a metric `SOURCE/NAME`: for those of training
    `act`, after the end of the metric window; else `decide`, after the evaluations."""
    return "act" if _get_source(monitor) == "train" else "decide"


def check_metric_exists(run: Run, monitor: str, where: str) -> None:
    """Raise a ConfigurationError if nothing in a run measures a metric, as far as that is known
    before the first step.

    Metrics come from training, from evaluators, and from plugins under their own names. A plugin of
    the program may report under any name, so with one of those nothing is certain.

    Args:
        run: before its first step.
        monitor: the metric, `SOURCE/NAME`.
        where: which plugin looks at it, for the error.
    """
    source, _, name = monitor.partition("/")
    if source == "train":
        types = run.engine.get_metric_types(run.state, source)
        known = types.keys() | _ENGINE_METRICS
        if not _is_among(name, known):
            raise ConfigurationError(
                f"{where}: training measures no {monitor!r}. {did_you_mean(name, known)}"
            )
        return
    registered = run.engine.plugins.plugins.values()
    is_certain = all(map(_reports_under_its_name, registered))
    evaluator = run.engine.evaluations.get(source)
    # What an evaluator that is not traced before the first step measures is known when it has run.
    if evaluator is not None and evaluator.check_at_start and is_certain:
        types = run.engine.get_metric_types(run.state, source)
        if not _is_among(name, types):
            raise ConfigurationError(
                f"{where}: evaluator {source!r} measures no {monitor!r}. "
                f"{did_you_mean(name, types)}"
            )
    evaluators = {*run.engine.evaluations}
    evaluators |= {
        plugin.name.partition(":")[2]
        for plugin in registered
        if plugin.name.startswith("evaluator:")
    }
    known = evaluators.union(*(plugin.aliases for plugin in registered))
    if source not in known and is_certain:
        raise ConfigurationError(
            f"{where}: nothing measures {monitor!r}: there is no evaluator {source!r}. "
            f"{did_you_mean(source, {'train', *evaluators})}"
        )


def _is_among(name: str, metrics: Iterable[str]) -> bool:
    """Return whether a number is one of some metrics, or a part of one: a metric of several numbers
    has one class for all of them."""
    return any(
        name == metric or name.startswith((f"{metric}/", f"{metric}[")) for metric in metrics
    )


def check_metric_measured(
    run: Run, monitor: str, trigger: Trigger, where: str, stop: int | None = None
) -> None:
    """Raise a ConfigurationError if a metric will not be measured at a step at which it decides, as
    far as that is known before the first step.

    Args:
        run: before its first step.
        monitor: the metric, `SOURCE/NAME`.
        trigger: when it decides.
        where: which plugin decides, for the error.
        stop: from which step on it decides no more; None for never.
    """
    triggers = _list_measuring_triggers(run, monitor)
    # A trial runs every action at its last step.
    if triggers is None or run.engine.fast_dev_run is not None:
        return
    step_range = _predict_epoch_ends(run)
    for step in islice(_iter_steps(run, trigger, step_range), _NUM_DECISIONS):
        if stop is not None and step >= stop:
            return
        if not _is_due(triggers, step, step_range):
            raise ConfigurationError(_describe_unmeasured(monitor, step, where))


def read_measured_metric(run: Run, monitor: str, where: str) -> float | None:
    """Return the value of a metric that was measured at this very step; waits for it.

    None if it was to be measured and was not, as the metrics of a window in which every update was
    skipped.

    Args:
        run: the run, at the step at which the plugin decides.
        monitor: the metric, `SOURCE/NAME`, such as `test/accuracy`.
        where: which plugin decides, for the error.

    Raises:
        ConfigurationError: there is none of this name, it is not a number, or it is not measured at
            this step.
    """
    source, _, name = monitor.partition("/")
    triggers = _list_measuring_triggers(run, monitor) or ()
    is_to_be_measured = _is_due(triggers, run.step, run.step_range)
    if source == "train" and name not in run.metrics.get(source, {}) and is_to_be_measured:
        return None  # no window has had an update yet
    value = run.get_metric(monitor)
    measured_at = run.history.find_last_step(monitor)
    # The history has no telemetry, such as an evaluation by the clock.
    if measured_at is None or measured_at == run.step:
        return value
    if is_to_be_measured:
        return None
    raise ConfigurationError(
        f"{_describe_unmeasured(monitor, run.step, where)}. Its newest value is of step "
        f"{measured_at}"
    )


def _reports_under_its_name(registered: RegisteredPlugin) -> bool:
    """Return whether a plugin is one of ours, which log under their own names."""
    plugin = registered.plugin
    return type(plugin).__module__.startswith("fulgurite") and not isinstance(plugin, LambdaPlugin)


def find_module_view(engine: EngineView, monitor: str) -> str:
    """Return the module view whose weights a metric measures: that of its evaluation, else
    `current`.

    Args:
        engine: the engine that trains.
        monitor: the metric, `SOURCE/NAME`.
    """
    source = _get_source(monitor)
    registered = engine.plugins.plugins.get(f"evaluator:{source}")
    evaluator = engine.evaluations.get(source)
    # An evaluator with a function of its own chooses the weights itself.
    for owner in (registered and registered.plugin, evaluator):
        view = getattr(owner, "module_view", None)
        if isinstance(view, str):
            return view
    return "current"


def _is_due(triggers: Iterable[Trigger], step: int, step_range: StepRange) -> bool:
    return any(trigger.next(step - 1, step_range) == step for trigger in triggers)


def _describe_unmeasured(monitor: str, step: int, where: str) -> str:
    source = _get_source(monitor)
    if source == "train":
        return (
            f"{where}: {monitor!r} decides at step {step}, and no metric window ends there: log at "
            "the same steps, by Engine(log_every=...), or monitor an evaluation"
        )
    return (
        f"{where}: {monitor!r} decides at step {step}, and {source!r} is not evaluated there: "
        "evaluate at the same steps"
    )


def _list_measuring_triggers(run: Run, monitor: str) -> list[Trigger] | None:
    """Return when the source of a metric measures it; None where no action is known that does, as
    for what a plugin reports in its own way."""
    source = _get_source(monitor)
    actions = run.engine.actions
    if source == "train":
        measuring = [action for action in actions if action.closes_window]
    else:
        measuring = [action for action in actions if action.name == f"evaluator:{source}.evaluate"]
        if not measuring:
            return None
    return [action.trigger for action in measuring if is_exact(action.trigger)]


def _iter_steps(run: Run, trigger: Trigger, step_range: StepRange) -> Iterator[int]:
    """Yield the steps of a trigger from this one on."""
    step = trigger.next(run.step - 1, step_range)
    while step is not None:
        yield step
        step = trigger.next(step, step_range)


def _predict_epoch_ends(run: Run) -> StepRange:
    """Return the step range with the epoch ends to come, if the length of an epoch is known."""
    step_range = run.step_range
    length = run.data_iterator.epoch_length
    if length is None or step_range.stop is None:
        return step_range
    last = max((step_range.start, *step_range.epoch_ends))
    further = range(last + length, step_range.stop + 1, length)[:_NUM_DECISIONS]
    return replace(step_range, epoch_ends=(*step_range.epoch_ends, *further))


def _get_source(monitor: str) -> str:
    return monitor.partition("/")[0]
