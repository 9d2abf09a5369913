"""At how many of the steps at which the monitor was measured there is something to choose from."""

from dataclasses import dataclass, field

import fulgurite as fg


@dataclass
class MonitorCoverage:
    """The steps of a fit at which the monitor was measured, and those that were saved.

    Attributes:
        monitor: the metric by which the best checkpoint is chosen, or None.
        measured_steps: at which it was measured.
        saved_steps: at which a checkpoint was saved.
        is_reported: whether the run has been told.
    """

    monitor: str | None = None
    measured_steps: set[int] = field(default_factory=set)
    saved_steps: set[int] = field(default_factory=set)
    is_reported: bool = False

    def note_metrics(self, record: fg.Record) -> None:
        """Note the step of a record that has the monitor."""
        if any(f"{record.source}/{name}" == self.monitor for name in record.values):
            self.measured_steps.add(record.step)

    def report(self, run: fg.Run) -> None:
        """Tell, at the end of a run, that the best was not chosen from all that was evaluated. That
        training is logged more often than it is saved is nothing to tell."""
        num_measured = len(self.measured_steps)
        num_saved = len(self.measured_steps & self.saved_steps)
        if self.monitor is None or self.monitor.startswith("train/") or self.is_reported:
            return
        # That there is none at all is warned of elsewhere.
        if 0 < num_saved < num_measured:
            # The last step may be saved twice: early stopping puts back weights after the first.
            self.is_reported = True
            run.notify(
                "checkpoints",
                f"{num_saved} of {num_measured} evaluations of {self.monitor} were at a saved "
                "step, and the best checkpoint is the best of those: save wherever it is "
                "evaluated, by the same every=",
            )
