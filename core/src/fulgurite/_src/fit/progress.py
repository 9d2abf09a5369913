"""How far a fit is, and how far it goes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fulgurite._src.data.readers import BatchItem
from fulgurite._src.fit.snapshot import TrainingLength
from fulgurite._src.triggers import StepRange


class Progress:
    """How far a fit is, and how far it goes.

    Attributes:
        first_step: the step at which this process began.
        step: the number of updates that were dispatched.
        step_range: start, stop (as far as it is known) and epoch ends of the fit.
        requested_length: how long to train.
        data_position: of the data, after the batch of the newest step.
        stop_reason: why training ends before its planned end, or None.
        action_stop_reason: why actions have ended it at this step, which is the planned end since.

    Args:
        step: that of the state with which this process begins.
        step_range: of the fit.
        requested_length: how long to train.
    """

    def __init__(self, step: int, step_range: StepRange, requested_length: TrainingLength) -> None:
        self.first_step = step
        self.step = step
        self.step_range = step_range
        self.requested_length = requested_length
        self.data_position: Any = None
        self.stop_reason: str | None = None
        self.action_stop_reason: str | None = None

    @property
    def is_at_end(self) -> bool:
        """Whether the planned end is reached."""
        return self.step == self.step_range.stop

    @property
    def should_train(self) -> bool:
        """Whether there are steps left to take."""
        if self.stop_reason is not None:
            return False
        return self.step_range.stop is None or self.step < self.step_range.stop

    def advance(self, items: Sequence[BatchItem]) -> None:
        """Count the steps of a dispatch; the planned end may move.

        Args:
            items: the batches of the steps.
        """
        self.step += len(items)
        self.data_position = items[-1].position
        if items[-1].epoch_end:
            self._end_epoch()
        elif self.requested_length.epochs is not None and self.is_at_end:
            # The last epoch is longer than the one from which its end was guessed.
            self.step_range = replace(self.step_range, stop=self.step + 1)

    def stop_by_action(self, reason: str) -> None:
        """Make this step the planned end; several plugins may want to stop at one step, and each
        reason is reported."""
        reasons = [self.action_stop_reason, reason]
        self.action_stop_reason = "; ".join(reason for reason in reasons if reason)
        self.stop_reason = self.action_stop_reason
        self.step_range = replace(self.step_range, stop=self.step)

    def _end_epoch(self) -> None:
        """Note the present step as the end of an epoch, and with it the end of a run that is
        counted in epochs."""
        epoch_ends = (*self.step_range.epoch_ends, self.step)
        stop = self.step_range.stop
        epochs = self.requested_length.epochs
        if epochs is not None:
            previous_end = epoch_ends[-2] if len(epoch_ends) > 1 else self.step_range.start
            epochs_left = max(epochs - len(epoch_ends), 0)
            stop = self.step + epochs_left * (self.step - previous_end)
        self.step_range = replace(self.step_range, epoch_ends=epoch_ends, stop=stop)
