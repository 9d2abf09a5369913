"""The plugin: a summary at the start, a line while training runs, the times at the end."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import fulgurite as fg
import jax
from fulgurite.errors import ConfigurationError, NonFiniteError
from fulgurite.plugins import hide_constructor_frames

if TYPE_CHECKING:
    from rich.console import Console

    from fulgurite_progress.display import Display
    from fulgurite_progress.startup import Startup


@hide_constructor_frames
@dataclass(frozen=True, eq=False)
class ProgressBar(fg.Plugin):
    """Show a run on standard error: in a terminal or a notebook as one line that is kept up to
    date, elsewhere as plain lines at growing intervals.

    It never waits for the device and takes part in no step.
    Only the first process shows anything.

    Example:
        from fulgurite_progress import ProgressBar

        engine = fg.Engine(steps=1000, plugins=[ProgressBar(times=False)])

    Attributes:
        refresh: how often per second the line in a terminal or a notebook is updated.
        summary: whether a table of the model and of each compiled step is printed.
        times: whether a table of where the wall time went is printed at the end.
        hide: names of metrics that are left out, also of phases and evaluations.
    """

    refresh: float = 5.0
    summary: bool = True
    times: bool = True
    hide: tuple[str, ...] = ("batch_loss", "loss_average")
    _startups = fg.PerFit[list["Startup"]](list)
    _displays = fg.PerFit[list["Display"]](list)
    # Said before there is a display.
    _early_messages = fg.PerFit[list[str]](list)

    plugin_name = "progress"

    def __post_init__(self) -> None:
        if not isinstance(self.refresh, int | float) or not 0 < self.refresh <= 60:
            raise ConfigurationError(
                f"ProgressBar: refresh is {self.refresh!r}; it is a rate from 0 to 60 a second"
            )
        if isinstance(self.hide, str):
            raise ConfigurationError(
                f"ProgressBar: hide is a string, {self.hide!r}; it is a tuple of names, such as "
                f"hide=({self.hide!r},)"
            )

    @fg.hookimpl
    @contextmanager
    def around_fit(self, timings: fg.Timings) -> Iterator[None]:
        """Show that the fit is starting."""
        console = _open_console()
        if console is None:
            yield
            return
        from fulgurite_progress.live_line import pause_outer_line
        from fulgurite_progress.startup import Startup

        with pause_outer_line(), Startup(timings, console, self.refresh) as startup:
            self._startups.append(startup)
            try:
                yield
            finally:
                self._startups.clear()

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Print the summary and begin the line."""
        early_messages = list(self._early_messages)
        self._early_messages.clear()
        for startup in self._startups:
            startup.stop()
        console = _open_console()
        if console is None:
            return
        from fulgurite_progress.display import Display
        from fulgurite_progress.summary import model_summary

        if self.summary:
            console.print(
                model_summary(
                    run.state, update_rule=run.update_rule.for_step(run.step, run.step_range)
                )
            )
        display = Display(run, console, self.refresh, tuple(self.hide))
        self._displays.append(display)
        display.start()
        for message in early_messages:
            display.print_message(message)

    @fg.hookimpl
    def on_compile(self, run: fg.Run | None, name: str, compiled: Any, jaxpr: Any) -> None:
        """Print what the executable takes.

        Args:
            run: the run.
            name: of the program.
            compiled: the executable.
            jaxpr: the program as it was traced.
        """
        if run is not None and self.summary and self._displays:
            self._displays[0].print_cost(name, compiled, jaxpr)

    @fg.hookimpl
    def on_evaluate_end(self, run: fg.Run, source: str, metrics: dict[str, Any]) -> None:
        """Print a line for the evaluation, above that of the run."""
        if self._displays:
            self._displays[0].print_evaluation(source, metrics)

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        """Keep the newest metrics for the line, and print what the run has to say above it."""
        if record.kind == "text":
            self._print_message(record)
        elif record.kind == "scalars" and self._displays:
            self._displays[0].log(record)

    def _print_message(self, record: fg.Record) -> None:
        message = record.values.get("message")
        # Python prints a warning of what failed.
        if message is None or "failed" in record.values:
            return
        if self._displays:
            self._displays[0].print_message(message)
        else:
            self._early_messages.append(message)

    @fg.hookimpl
    def on_exception(self, run: fg.Run, exception: BaseException) -> None:
        """Leave the terminal as it was."""
        # Steps after it may have been dispatched.
        step = exception.step if isinstance(exception, NonFiniteError) else None
        self._stop_display(f"ended by {type(exception).__name__}", step)

    @fg.hookimpl
    def on_fit_end(self, run: fg.Run, result: fg.FitResult) -> None:
        """End the line and print the times."""
        from fulgurite_progress.times import timing_table

        ending = f"stopped: {result.stop_reason}" if result.stop_reason else "done"
        display = self._stop_display(ending)
        if display is not None and self.times:
            display.console.print(timing_table(result.timings))

    def _stop_display(self, ending: str, failed_step: int | None = None) -> "Display | None":
        if not self._displays:
            return None
        display = self._displays.pop()
        display.stop(ending, failed_step)
        return display


def _open_console() -> "Console | None":
    """Return a console on standard error; None where this process shows nothing."""
    if jax.process_index() > 0 or sys.stderr is None:
        return None
    from fulgurite_progress.screen import Screen

    return Screen(file=sys.stderr)
