"""The plugin that ends training when a metric no longer improves."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, asdict, dataclass
from functools import partial
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
from fulgurite.errors import (
    ConfigurationError,
    check_callable,
    set_ints,
)
from fulgurite.metrics import Mode, find_mode, is_better, resolve_mode
from fulgurite.plugins import (
    as_trigger,
    check_metric_exists,
    check_metric_measured,
    copy_arrays,
    find_module_view,
    get_decision_stage,
    hide_constructor_frames,
    is_exact,
    read_measured_metric,
    tree_signature,
)

from fulgurite_stopping.progress import read_progress


@dataclass
class _Progress:
    """What an `EarlyStopping` has seen so far.

    Attributes:
        best: the best value; None before the first.
        best_step: where it was measured.
        num_failed: the number of checks since then that count.
    """

    best: float | None = None
    best_step: int | None = None
    num_failed: int = 0


@hide_constructor_frames
@dataclass(frozen=True, eq=False)
class EarlyStopping(fg.Plugin):
    """Ends training when a metric has not improved for `patience` checks, as if that step were the
    planned end.

    A check runs with each evaluation of the metric. What it has seen is saved with the step, so a
    resumed run stops where the uninterrupted one would; the settings are those of the program now.

    Example:
        from fulgurite_evaluators import Evaluator
        from fulgurite_stopping import EarlyStopping

        stopping = EarlyStopping("test/loss", patience=5, not_before=100)
        engine = fg.Engine(steps=200, plugins=[Evaluator("test", data, every=20), stopping])
        result = engine.fit(model, data)
        print(result.stop_reason)

    Attributes:
        monitor: a metric `SOURCE/NAME`, such as `test/loss`. Those of `train` are looked at at each
            log step, over the window that ends there, for which the loop waits; the weights of that
            step are those at the end of the window.
        patience: the number of checks without an improvement after which training ends.
        min_delta: a change counts as an improvement if it is larger than this.
        mode: whether a smaller (`min`) or a larger (`max`) value is better. None to tell it from
            the metric's name, or else its class.
        better: `better(value, best)` says whether a value is an improvement, instead of `mode` and
            `min_delta`.
        threshold: training ends as soon as a value is better than this.
        divergence: training ends as soon as a value is worse than this. NaN and infinities are
            worse than any number.
        check_finite: whether a value that is NaN or infinite ends training. Such a value is never
            the best, also in the mode in which it would be the smallest or the largest.
        not_before: the first step that can end training. Values before it count for the best only.
        every: when to check; None to check with the evaluator of that name. Give it for metrics
            that another plugin reports, at the same steps.
        restore_best: whether training ends with the weights and the model state of the best value:
            those that were measured, so with the average where the evaluator has a `module_view`.
            They are kept on the devices, as part of the train state, which takes the memory of one
            more copy of the weights.
        name: tells apart several such plugins for one metric.
    """

    plugin_name = "early_stopping"

    monitor: str
    patience: int = 3
    min_delta: float = 0.0
    _: KW_ONLY
    mode: Mode | None = None
    better: Callable[[float, float], bool] | None = None
    threshold: float | None = None
    divergence: float | None = None
    check_finite: bool = True
    not_before: int = 0
    every: fg.Trigger | int | None = None
    restore_best: bool = False
    name: str | None = None
    _progress = fg.PerFit(_Progress)
    # Of the metric's class, where neither `mode` nor its name tells.
    _class_mode = fg.PerFit[Mode | None](lambda: None)

    def __post_init__(self) -> None:
        if not isinstance(self.monitor, str) or "/" not in self.monitor:
            raise ConfigurationError(
                f"EarlyStopping: monitor is {self.monitor!r}; write SOURCE/NAME, as in test/loss"
            )
        set_ints(self, "patience")
        if type(self.patience) is not int or self.patience < 1:
            raise ConfigurationError(
                f"EarlyStopping: patience is {self.patience!r}; it must be a positive integer: "
                "1 stops at the first check that is not an improvement"
            )
        self._check_numbers()
        if self.mode is not None:
            resolve_mode(self.monitor, self.mode, "EarlyStopping")
        elif self.better is None:
            object.__setattr__(self, "mode", find_mode(self.monitor))
        self._check_better()
        if self.every is None:
            return
        if self._source == "train":
            raise ConfigurationError(
                "EarlyStopping: metrics of training are looked at at each log step: leave every out"
            )
        if not is_exact(as_trigger(self.every)):
            raise ConfigurationError(
                f"EarlyStopping: every is {self.every!r}; pass steps, or a trigger that counts "
                "steps or epochs, not seconds, so that a resumed run does the same"
            )

    def _check_numbers(self) -> None:
        for name in ("min_delta", "threshold", "divergence", "not_before"):
            value = getattr(self, name)
            is_left_out = value is None and name in ("threshold", "divergence")
            if not is_left_out and not _is_finite(value):
                raise ConfigurationError(
                    f"EarlyStopping: {name} is {value!r}; it must be a finite number"
                )
        if self.min_delta < 0:
            raise ConfigurationError(
                f"EarlyStopping: min_delta is {self.min_delta!r}; it must not be negative"
            )

    def _check_better(self) -> None:
        if self.better is None:
            return
        check_callable(self.better, "EarlyStopping: better")
        needs_mode = self.threshold is not None or self.divergence is not None
        if self.min_delta or (needs_mode and self.mode is None):
            raise ConfigurationError(
                "EarlyStopping: better replaces min_delta, and threshold and divergence need "
                "mode='min' or mode='max' besides it"
            )

    @property
    def instance(self) -> str:
        """Several such plugins have different metrics, or names."""
        return self.name or self.monitor

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Check the metric after it was measured, and restore the best weights at the end."""
        follows = "log" if self._source == "train" else f"evaluator:{self._source}.evaluate"
        trigger = follows if self.every is None else self.every
        stage = get_decision_stage(self.monitor)
        actions = [fg.ScheduledAction("check", trigger, self.check_metric, stage)]
        if self.restore_best:
            after = (f"{self.registered_name}.check",)
            actions.append(
                fg.ScheduledAction("restore", fg.AtEnd(), self.restore, stage, after=after)
            )
        return actions

    @fg.hookimpl
    def init_plugin_state(self, module: Any, model_state: Any) -> Any:
        """Return a place for the best weights.

        Args:
            module: the module.
            model_state: its state.
        """
        if not self.restore_best:
            return None
        return _select_arrays(module, model_state)

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Refuse a metric that is not measured at a check."""
        check_metric_exists(run, self.monitor, "EarlyStopping")
        if self.every is not None:
            check_metric_measured(run, self.monitor, as_trigger(self.every), "EarlyStopping")
        if self.restore_best:
            self._check_view(run)
        if self.mode is None and self.better is None:
            object.__setattr__(self, "_class_mode", self._find_mode_of_class(run))

    @fg.hookimpl
    def get_host_state(self) -> dict[str, Any]:
        """Return the best value and the number of checks since."""
        return asdict(self._progress)

    @fg.hookimpl
    def set_host_state(self, state: Any, version: int) -> None:
        """Go on with the best value of a checkpoint.

        Args:
            state: the value of `get_host_state`.
            version: of the plugin that wrote it.
        """
        object.__setattr__(self, "_progress", read_progress(_Progress, state))

    def check_metric(self, run: fg.Run) -> fg.StopTraining | fg.ReplaceState | None:
        """Note the value at this step, and return what follows from it."""
        value = read_measured_metric(run, self.monitor, "EarlyStopping")
        if value is None:
            return None
        best_step = self._progress.best_step
        reason = self.update(value, run.step)
        if reason is not None:
            return fg.StopTraining(reason)
        if self.restore_best and self._progress.best_step != best_step:
            return self._keep_weights(run)
        return None

    def update(self, value: float, step: int) -> str | None:
        """Note a value, and return the reason to stop, or None.

        Args:
            value: of the metric.
            step: at which it was measured.
        """
        progress = self._progress
        is_finite = math.isfinite(value)
        if is_finite and self._is_improvement(value, progress.best):
            progress.best = value
            progress.best_step = step
            progress.num_failed = 0
        elif step >= self.not_before:
            progress.num_failed += 1
        if step < self.not_before:
            return None
        if self.check_finite and not is_finite:
            return f"{self.monitor} is {value} at step {step}"
        return self._find_limit_passed(value) or self._find_lost_patience()

    def restore(self, run: fg.Run) -> fg.ReplaceState | None:
        """Return the state with the best weights: those that were measured."""
        progress = self._progress
        view = find_module_view(run.engine, self.monitor)
        is_last = progress.best_step == run.step
        if progress.best_step is None or (is_last and view == "current"):
            return None
        if is_last:
            best = self._copy_measured(run)
        else:
            best = copy_arrays(run.state.plugin_states[self.registered_name])
        weights = "the weights" if view == "current" else f"the weights {view!r}"
        source = "" if is_last else "; they were kept in memory"
        run.notify(
            self.plugin_name,
            f"training ends with {weights} of step {progress.best_step}, where {self.monitor} was "
            f"{progress.best:.6g}{source}",
        )
        module = eqx.combine(best["module"], run.state.module)
        return fg.ReplaceState(run.state.replace(module=module, model_state=best["model_state"]))

    def _keep_weights(self, run: fg.Run) -> fg.ReplaceState:
        state = run.state
        best = self._copy_measured(run)
        return fg.ReplaceState(state.with_plugin_state(self, best))

    def _copy_measured(self, run: fg.Run) -> dict[str, Any]:
        """Return a copy of the weights that the metric measures now, as they are kept."""
        new = self._select_measured(run, run.state)
        old = run.state.plugin_states[self.registered_name]
        return jax.tree.map(
            lambda old, new: jax.device_put(new, old.sharding), old, copy_arrays(new)
        )

    def _select_measured(self, run: fg.Run, state: fg.TrainState) -> dict[str, Any]:
        view = find_module_view(run.engine, self.monitor)
        state = run.engine.apply_module_view(state, view)
        return _select_arrays(state.module, state.model_state)

    def _check_view(self, run: fg.Run) -> None:
        """Raise a ConfigurationError if a run could not end with the weights that are measured."""
        view = find_module_view(run.engine, self.monitor)
        if view == "current":
            return
        state = run.state
        best = eqx.filter_eval_shape(partial(self._select_measured, run), state)
        place = eqx.filter_eval_shape(_select_arrays, state.module, state.model_state)
        if tree_signature(best) != tree_signature(place):
            raise ConfigurationError(
                f"EarlyStopping: {self.monitor} measures the weights {view!r}, which have other "
                "arrays than the module, so that training cannot end with them: leave restore_best "
                "out, and keep the best with fulgurite_checkpoint.Checkpointer(monitor="
                f"{self.monitor!r})"
            )

    def _is_improvement(self, value: float, best: float | None) -> bool:
        if best is not None and self.better is not None:
            return bool(self.better(value, best))
        return self._is_better(value, best, self.min_delta)

    def _is_better(self, value: float, other: float | None, margin: float = 0.0) -> bool:
        return is_better(value, other, self.mode or self._class_mode or "min", atol=margin)

    def _find_mode_of_class(self, run: fg.Run) -> Mode:
        """Return the mode that the class of the metric tells."""
        source, _, name = self.monitor.partition("/")
        types = {}
        if source == "train" or source in run.engine.evaluations:
            types = run.engine.get_metric_types(run.state, source)
        # A metric of several numbers has one class for all of them.
        metric_type = types.get(name) or types.get(name.rpartition("/")[0])
        is_higher_better = getattr(metric_type, "higher_is_better", None)
        if is_higher_better is None:
            raise ConfigurationError(
                f"EarlyStopping: is a larger or a smaller {self.monitor!r} better? Neither its "
                "name nor its class tells: give mode='max' or mode='min'"
            )
        return "max" if is_higher_better else "min"

    def _find_limit_passed(self, value: float) -> str | None:
        if self.threshold is not None and self._is_better(value, self.threshold):
            return f"{self.monitor} is {value:.6g}, better than the threshold {self.threshold:g}"
        if self.divergence is not None and self._is_better(self.divergence, value):
            return f"{self.monitor} is {value:.6g}, which is worse than {self.divergence:g}"
        return None

    def _find_lost_patience(self) -> str | None:
        progress = self._progress
        if progress.num_failed < self.patience:
            return None
        if progress.best is None:
            return f"{self.monitor} has had no finite value in {progress.num_failed} checks"
        checks = "check" if progress.num_failed == 1 else "checks"
        return (
            f"{self.monitor} has not improved for {progress.num_failed} {checks}: it was "
            f"{progress.best:.6g} at step {progress.best_step}"
        )

    @property
    def _source(self) -> str:
        return self.monitor.partition("/")[0]


def _is_finite(value: Any) -> bool:
    """Return whether a value is a finite number, of whatever library."""
    try:
        return math.isfinite(value)
    except TypeError:
        return False


def _select_arrays(module: Any, model_state: Any) -> dict[str, Any]:
    return {"module": eqx.filter(module, eqx.is_array), "model_state": model_state}
