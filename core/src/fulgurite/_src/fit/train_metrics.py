"""The metrics of training: what the loggers and `run.metrics` get of each metric window."""

from time import monotonic

import jax
import numpy as np

from fulgurite._src.execution.flat_state import Vectors
from fulgurite._src.fit.records import Record
from fulgurite._src.fit.running import RunningFit
from fulgurite._src.metrics.basic import is_over_nothing
from fulgurite._src.timing import StepRate
from fulgurite._src.training.nonfinite import SkippedSteps


class TrainMetrics:
    """Logs each metric window, and notices a fit whose every step was skipped.

    Args:
        fit: the running fit.
        num_skipped: how many steps were skipped before it.
    """

    def __init__(self, fit: RunningFit, num_skipped: int) -> None:
        self._fit = fit
        self._rate = StepRate()
        self._skipped = SkippedSteps(fit.progress.step, num_skipped)
        self._has_told_of_nothing = False

    def log_window(self) -> None:
        """Close the metric window at this step, and log its values as soon as they are computed."""
        fit = self._fit
        step = fit.progress.step
        stream = fit.scheduler.log_stream
        values = fit.state.close_window()

        def finish() -> Record | None:
            previous = fit.metrics.get("train", {})
            metrics = fit.program.read_window(values, previous)
            if metrics is None:
                return None
            metrics = fit.records.select_writable("train", metrics)
            fit.metrics["train"] = previous | metrics
            if "skipped_steps" in metrics:
                self._skipped.note(step, int(metrics["skipped_steps"]))
            if np.isnan(metrics.get("loss", 0)).any():
                self._notify_if_mean_of_nothing(step, values)
            return Record("scalars", "train", step, metrics, stream)

        steps_per_second = self._rate(step, monotonic())
        if steps_per_second is not None:
            speed = {"steps_per_second": steps_per_second}
            fit.records.emit("scalars", "train", speed, step, "telemetry")
        fit.records.enqueue(jax.tree.leaves(values), finish, stream)

    def _notify_if_mean_of_nothing(self, step: int, values: Vectors) -> None:
        """Tell the user, once, of a window whose loss is NaN because it is 0 / 0. A metric of the
        step that replaces the loss may be NaN for any reason.

        Args:
            step: the last of the window.
            values: of the window.
        """
        packing = self._fit.program.layout.packing
        loss = packing.get_subtree(jax.device_get(values), "metric_window").values.by_name["loss"]
        if not is_over_nothing(loss) or self._has_told_of_nothing:
            return
        self._has_told_of_nothing = True
        self._fit.notify(
            f"train/loss is NaN at step {step}, because it is a mean over nothing: no batch since "
            "the last log step weighs anything, as where all tokens or examples are masked. "
            "Such batches train nothing"
        )

    def notify_if_all_skipped(self) -> None:
        """Tell the user if the fit has trained nothing, because every step was skipped."""
        fit = self._fit
        if fit.engine.on_nonfinite != "skip":
            return
        self._skipped.note(fit.progress.step, int(fit.state.read().nonfinite.skipped))
        if self._skipped.are_all:
            fit.notify(
                f"nothing was trained: each of the {self._skipped.num_steps} steps was skipped, "
                "because it was not finite. Engine(on_nonfinite='raise') names what was not"
                " finite"
            )
