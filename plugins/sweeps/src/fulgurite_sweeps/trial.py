"""The plugin in each trial: it asks the pruner at evaluations, and writes how the trial ended."""

import json
import math
import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import fulgurite as fg
import jax
import numpy as np
from fulgurite.errors import ConfigurationError
from fulgurite.plugins import check_metric_exists, get_decision_stage, read_measured_metric
from fulgurite_runs import RunPlugin

from fulgurite_sweeps.attributes import PRUNED_AT
from fulgurite_sweeps.results import TrialResult, write_result

if TYPE_CHECKING:
    from fulgurite_sweeps.journal import Journal

VARIABLE = "FULGURITE_SWEEP_TRIAL"
"""The environment variable in which the driver tells a trial what it is."""


@dataclass(frozen=True)
class TrialSettings:
    """What a trial is told.

    Example:
        from fulgurite_sweeps import TrialSettings

        settings = TrialSettings("runs/sweep", number=3, metrics=["test/loss"], pruner="asha")

    Attributes:
        directory: of the sweep.
        number: of the trial.
        metrics: the objectives, as `SOURCE/NAME`.
        pruner: such as `asha`; None without one.
    """

    directory: str
    number: int
    metrics: list[str]
    pruner: str | None = None


def read_settings() -> TrialSettings:
    """Return what the driver says in the environment.

    Raises:
        ConfigurationError: there is no driver.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        raise ConfigurationError(
            "SweepTrial: this plugin is for the runs that `fulgurite sweep` starts: leave it out"
        )
    return TrialSettings(**json.loads(text))


class SweepTrial(RunPlugin):
    """Ends a trial that the pruner gives up, and writes the trial's metrics into its directory.

    `fulgurite sweep` adds it to each trial by its name. It changes no number: the records of a
    trial are those of the same run alone, up to the step at which it was pruned.

    Example:
        from fulgurite_sweeps import SweepTrial, TrialSettings

        trial = SweepTrial(TrialSettings("runs/sweep", number=0, metrics=["test/loss"]))
        engine = fg.Engine(steps=100, run_dir="runs/sweep/trial-0", plugins=[trial])

    Args:
        settings: of the trial; None to read them from the environment.
    """

    plugin_name = "sweep_trial"

    def __init__(self, settings: TrialSettings | None = None) -> None:
        self._settings = settings or read_settings()

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        """Ask the pruner at each evaluation of the metric."""
        if self._settings.pruner is None:
            return []
        source = self._monitor.partition("/")[0]
        follows = "log" if source == "train" else f"evaluator:{source}.evaluate"
        stage = get_decision_stage(self._monitor)
        return [fg.ScheduledAction("prune", follows, self.ask_pruner, stage)]

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Refuse metrics that nothing measures, before the first step."""
        for metric in self._settings.metrics:
            check_metric_exists(run, metric, "sweep")

    @fg.hookimpl
    def on_fit_end(self, run: fg.Run, result: fg.FitResult) -> None:
        """Write the metrics, unless the run is to be resumed.

        Args:
            run: the run.
            result: of its fit.
        """
        if not run.is_complete or run.run_dir is None or jax.process_index() > 0:
            return
        metrics = {
            f"{source}/{name}": float(value)
            for source, values in run.metrics.items()
            for name, value in values.items()
            if np.ndim(value) == 0
        }
        # Not by the reason alone, which a run that was killed here does not know any more.
        is_pruned = self._settings.pruner is not None and self._read_pruned_at() == run.step
        run.run_dir.assert_locked()
        write_result(
            run.run_dir.path, TrialResult(run.step, metrics, result.stop_reason, is_pruned)
        )

    def ask_pruner(self, run: fg.Run) -> fg.StopTraining | None:
        """Report the value at this step, and stop here if the pruner gives the trial up.

        The answer is in the journal before the trial stops. A trial that is resumed from an earlier
        checkpoint passes the steps that it had passed, and stops where it had been stopped, as if
        it had not been interrupted.

        Args:
            run: at an evaluation.
        """
        value = read_measured_metric(run, self._monitor, "sweep")
        if value is None:
            return None
        pruned_at = self._read_pruned_at()
        if pruned_at is None:
            pruned_at = self._report(run, value)
        if pruned_at != run.step:
            return None
        return fg.StopTraining(
            f"pruned by {self._settings.pruner}: {self._monitor} was {value:.6g} at step {run.step}"
        )

    def _report(self, run: fg.Run, value: float) -> int | None:
        """Report a value; return the step if the pruner gives the trial up.

        Args:
            run: at an evaluation.
            value: of the metric.
        """
        number = self._settings.number
        last_step = self._journal.get_trial(number).last_step
        if last_step is not None and run.step < last_step:
            return None  # an earlier attempt has passed it
        trial_id = self._journal.get_trial_id(number)
        self._journal.storage.set_trial_intermediate_value(trial_id, run.step, value)
        if run.step == run.step_range.stop:
            return None  # there is nothing to save
        study = self._journal.study
        trial = self._journal.get_trial(number)
        if not math.isnan(value) and not study.pruner.prune(study, trial):
            return None
        self._journal.set_attribute(number, PRUNED_AT, run.step)
        return run.step

    def _read_pruned_at(self) -> int | None:
        trial = self._journal.get_trial(self._settings.number)
        return trial.user_attrs.get(PRUNED_AT)

    @cached_property
    def _journal(self) -> "Journal":
        # Only where there is a pruner: importing Optuna takes a third of a second.
        from fulgurite_sweeps.journal import SweepDirectory
        from fulgurite_sweeps.methods import make_pruner

        directory = SweepDirectory(self._settings.directory)
        return directory.load(make_pruner(self._settings.pruner))

    @property
    def _monitor(self) -> str:
        return self._settings.metrics[0]


def describe_variables(settings: TrialSettings) -> dict[str, str]:
    """Return the environment variables of a trial.

    Args:
        settings: what it is told.
    """
    names = [name for name in os.environ.get("FULGURITE_PLUGINS", "").split(",") if name]
    return {
        VARIABLE: json.dumps(vars(settings)),
        "FULGURITE_PLUGINS": ",".join([*names, SweepTrial.plugin_name]),
    }
