"""What is read of a running fit."""

from bisect import bisect_right
from typing import Any, Final

import numpy as np

from fulgurite._src.data.iterator import BatchIterator
from fulgurite._src.fit.history import History
from fulgurite._src.fit.running import RunningFit
from fulgurite._src.fit.snapshot import Snapshot
from fulgurite._src.training.state import TrainState
from fulgurite._src.triggers import StepRange
from fulgurite.errors import ConfigurationError, StateError, did_you_mean


class RunView:
    """What is read of a running fit; `Run` adds what plugins may do.

    Attributes:
        engine: the engine of this run.
        update_rule: how a batch becomes an update.
        timings: where the wall time went so far.
        resume: what `fit(resume=...)` was.
        requested_length: the steps and epochs that the fit was asked for, one of them None.
        run_dir: the directory of the run, as the plugin that opened it in `fit_context` set it;
            None without one.
        manifest: the description of the run, as JSON, as a plugin set it in `fit_context`; None
            without one. Loggers get it as the first record of kind `config`.
    """

    def __init__(self, fit: RunningFit) -> None:
        self._fit = fit
        self.engine: Final = fit.engine
        self.update_rule: Final = fit.program.update_rule
        self.timings: Final = fit.timings
        self.resume: Final = fit.resume
        self.requested_length: Final = fit.progress.requested_length
        self.run_dir: Any = None
        self.manifest: Any = None

    @property
    def attempt(self) -> int:
        """The number of this start of the run, from 1."""
        return self._fit.records.attempt

    @property
    def module_text(self) -> str:
        """The module as a string, in which everything that is not an array shows by its value."""
        return self._fit.program.module_text

    @property
    def step(self) -> int:
        """The number of updates dispatched to the device; reading any of their results waits for
        them."""
        return self._fit.progress.step

    @property
    def step_range(self) -> StepRange:
        """Start, stop (as far as it is known) and epoch ends of this fit."""
        return self._fit.progress.step_range

    @property
    def epoch(self) -> int:
        """The number of completed epochs of this fit, or of the run that it resumes."""
        return bisect_right(self.step_range.epoch_ends, self.step)

    @property
    def is_complete(self) -> bool:
        """Whether the fit has reached its planned end, with nothing left to do there."""
        return self._fit.is_complete

    @property
    def stop_reason(self) -> str | None:
        """Why training is about to stop before its planned end, or None."""
        return self._fit.progress.stop_reason

    @property
    def is_resumed(self) -> bool:
        """Whether this fit resumes from a checkpoint and host states were restored; otherwise
        plugins start afresh."""
        return self._fit.resumed_from is not None

    @property
    def resumed_from(self) -> Snapshot | None:
        """The snapshot that this fit resumes from, or None."""
        return self._fit.resumed_from

    @property
    def data(self) -> Any:
        """The training data, as `fit` got it; for data with an attribute `train`, that one."""
        return self._fit.data_iterator.data

    @property
    def data_iterator(self) -> BatchIterator:
        """Where the batches come from."""
        return self._fit.data_iterator

    @property
    def state(self) -> TrainState:
        """The state after `step` updates. The next step consumes its arrays: copy any that you
        keep.

        Waits for the device to check that the state is finite, and raises `NonFiniteError` if it is
        not.
        """
        self._check_is_between_steps()
        return self._fit.state.read()

    @property
    def unchecked_state(self) -> TrainState:
        """The state after `step` updates, for programs on the device that look at it while training
        continues: nothing waits for it, and it may not be finite. The next step consumes its
        arrays."""
        self._check_is_between_steps()
        return self._fit.state.peek()

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """The newest metrics by source: `metrics["train"]["loss"]`, `metrics["test"]["accuracy"]`.
        Waits for any that are still being computed, so decisions based on them do not depend on
        timing."""
        self._fit.records.flush(wait=True)
        return self._fit.metrics

    def get_metric(self, monitor: str) -> float:
        """Return the newest value of a metric `SOURCE/NAME`, such as `test/loss`.

        Waits as `metrics` does.

        Raises:
            ConfigurationError: there is none of this name yet, or it is not a number.
        """
        values = {
            f"{source}/{name}": value
            for source, metrics in self.metrics.items()
            for name, value in metrics.items()
        }
        if monitor not in values:
            raise ConfigurationError(
                f"there is no metric {monitor!r} at step {self.step}. "
                f"{did_you_mean(monitor, values)} An evaluator must run at the same steps"
            )
        value = values[monitor]
        if np.ndim(value):
            raise ConfigurationError(
                f"{monitor!r} is an array {np.shape(value)}; choose a metric that is a number"
            )
        return float(value)

    @property
    def history(self) -> History:
        """The newest exact scalars, from before a resume too; waits as `metrics` does."""
        self._fit.records.flush(wait=True)
        return self._fit.records.history

    @property
    def failures(self) -> dict[str, str]:
        """What failed so far without ending the fit, as in `result.failures`."""
        return dict(self._fit.records.failures)

    @property
    def num_records(self) -> int:
        """How many records this process has emitted so far."""
        return self._fit.records.num_records

    @property
    def shared(self) -> dict[str, dict[str, Any]]:
        """What plugins tell each other, by plugin name and key, on the host alone:
        `run.shared.setdefault("tuner", {})["factor"] = 0.5`. Values that are JSON are part of
        checkpoints."""
        return self._fit.shared

    def _check_is_between_steps(self) -> None:
        """Raise `StateError` where the next step may have consumed the state."""
        if not self._fit.is_between_steps:
            raise StateError(
                "run.state is valid only during the call that `run` was given to; copy what you "
                "need"
            )
