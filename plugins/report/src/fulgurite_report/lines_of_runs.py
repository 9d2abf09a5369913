"""Runs as plain lines, for a pipe or a file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fulgurite_report.data import get_rank
from fulgurite_report.run import Run
from fulgurite_report.text import as_printable, format_number

_MOST_NUMBERS = 8
_TELEMETRY = ("train/steps_per_second", "throughput/mfu", "goodput/goodput")


class LinePrinter:
    """Prints a line for what is new in runs: the step of each with its numbers, each message,
    its state, and what is waited for."""

    def __init__(self) -> None:
        self._printed: dict[Path, _Printed] = {}
        self._waiting: list[str] = []

    def print_new(self, runs: Sequence[Run], waiting: Sequence[str] = ()) -> None:
        """Print what is new since the last call.

        Args:
            runs: that are shown; others may come.
            waiting: what is waited for, a sentence each.
        """
        for sentence in waiting:
            if sentence not in self._waiting:
                print(sentence, flush=True)
        self._waiting = list(waiting)
        for run in runs:
            prefix = f"{run.name}  " if len(runs) > 1 else ""
            self._print_run(run, self._printed.setdefault(run.path, _Printed()), prefix)

    def _print_run(self, run: Run, printed: "_Printed", prefix: str) -> None:
        num_new = run.num_messages - printed.num_messages
        if num_new < 0:  # the run was started again, and read from its start
            num_new = run.num_messages
        printed.num_messages = run.num_messages
        for message in run.messages[-num_new:] if num_new else ():
            print(f"{prefix}step {message.step:,}  note: {message.text}", flush=True)
        if run.curves and run.step != printed.step:
            printed.step = run.step
            print(f"{prefix}{format_step(run)}  {_format_numbers(run)}", flush=True)
        if run.state != printed.state:
            printed.state = run.state
            print(f"{prefix}{run.state}", flush=True)


@dataclass
class _Printed:
    """What was printed of a run: its newest step, how many messages, and its state."""

    step: int = -1
    num_messages: int = 0
    state: str = ""


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
