"""Runs as plain lines, for a pipe or a file."""

from collections.abc import Sequence

from fulgurite_report.data import get_rank
from fulgurite_report.run import Run
from fulgurite_report.text import as_printable, format_number

_MOST_NUMBERS = 8
_TELEMETRY = ("train/steps_per_second", "throughput/mfu", "goodput/goodput")


class LinePrinter:
    """Prints a line for what is new in a run: its step with the newest numbers, each message, and
    its state.

    Args:
        runs: that are shown.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._steps = dict.fromkeys(range(len(runs)), -1)
        self._num_messages = dict.fromkeys(range(len(runs)), 0)
        self._states = dict.fromkeys(range(len(runs)), "")

    def print_new(self) -> None:
        """Print what is new since the last call."""
        for index, run in enumerate(self._runs):
            prefix = f"{run.name}  " if len(self._runs) > 1 else ""
            num_new = run.num_messages - self._num_messages[index]
            if num_new < 0:  # the run was started again, and read from its start
                num_new = run.num_messages
            self._num_messages[index] = run.num_messages
            for message in run.messages[-num_new:] if num_new else ():
                print(f"{prefix}step {message.step:,}  note: {message.text}", flush=True)
            if run.curves and run.step != self._steps[index]:
                self._steps[index] = run.step
                print(f"{prefix}{format_step(run)}  {_format_numbers(run)}", flush=True)
            if run.state != self._states[index]:
                self._states[index] = run.state
                print(f"{prefix}{run.state}", flush=True)


def format_step(run: Run) -> str:
    """Return the step of a run, and that of its end where it is known."""
    planned = run.planned_steps
    return f"step {run.step:,}" if planned is None else f"step {run.step:,}/{planned:,}"


def _format_numbers(run: Run) -> str:
    """Return the latest exact numbers, losses first, and rate and goodput."""
    exact = [
        name
        for name, curve in run.curves.items()
        if curve.stream == "exact" and not name.endswith(("batch_loss", "loss_average", "]"))
    ]
    names = sorted(exact, key=lambda name: get_rank(name, "exact"))[:_MOST_NUMBERS]
    names += [name for name in _TELEMETRY if name in run.curves]
    return "  ".join(
        f"{as_printable(name)} {format_number(run.curves[name].last)}" for name in names
    )
