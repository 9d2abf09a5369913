"""What `fulgurite watch` shows in a terminal."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from rich.console import ConsoleDimensions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fulgurite_report.curves import Curve
from fulgurite_report.data import get_chart_name, get_rank
from fulgurite_report.errors import ReportError
from fulgurite_report.growing import GrowingCurve
from fulgurite_report.lines_of_runs import format_step
from fulgurite_report.modes import find_mode
from fulgurite_report.plot import Line, draw
from fulgurite_report.run import Run
from fulgurite_report.text import as_printable, format_number, format_seconds
from fulgurite_report.timing import find_seconds

_COLOURS = ("bright_blue", "yellow", "green", "magenta", "cyan", "red", "white")
_RATE = "train/steps_per_second"
_GOODPUT = "goodput/goodput"
_MOST_MESSAGES = 4
_MOST_RUNS = 12
_FEWEST_ROWS = 6
_DOTS = 4


class View:
    """Builds the view of runs.

    Args:
        runs: that are shown; others may come into the list.
        metric: drawn first, `SOURCE/NAME` or its end; None for the one by which the runs choose
            their best, or a loss.

    Raises:
        ReportError: no run has such a metric.
    """

    def __init__(self, runs: Sequence[Run], metric: str | None = None) -> None:
        self._runs = runs
        self._wanted = metric
        self._metric: str | None = None
        self._log = False
        self._curves: WeakKeyDictionary[Curve, GrowingCurve] = WeakKeyDictionary()
        names = self._list_metrics()
        if metric is not None and names and self._find_wanted(names) is None:
            raise ReportError(
                f"no run has a metric {metric}; there are {', '.join(map(as_printable, names))}"
            )

    def press(self, key: str) -> bool:
        """Do what a key asks for, and return whether it asks for anything."""
        if key == "l":
            self._log = not self._log
            return True
        if key not in ("\t", "n", "p"):
            return False
        names = self._list_metrics()
        if names:
            metric = self._get_metric()
            position = names.index(metric) if metric in names else -1
            self._metric = names[(position + (-1 if key == "p" else 1)) % len(names)]
            self._wanted = None
        return True

    def build(
        self, size: ConsoleDimensions, waiting: Sequence[str] = (), *, has_keys: bool = True
    ) -> RenderableType:
        """Return the view.

        Args:
            size: of the terminal.
            waiting: what is waited for, a sentence each.
            has_keys: whether keys do something, which the last line then says.
        """
        table = [self._build_table(), Text()] if self._runs else []
        notes = [Text(text, "bold yellow", overflow="fold") for text in waiting[:_MOST_RUNS]]
        messages = self._build_messages()
        num_rows = len(self._list_shown()) + 2 + len(notes) + len(messages)
        height = max(size.height - num_rows - 6, _FEWEST_ROWS)
        plot = self._build_plot(size.width, height) if self._runs else []
        keys = [Text("Tab next metric   l logarithmic   q quit", "dim")] if has_keys else []
        return Group(*table, *plot, *notes, *messages, *keys)

    def _list_shown(self) -> list[int]:
        """Return the indices of the runs that the table has room for: of many, those that are
        running come first."""
        if len(self._runs) <= _MOST_RUNS:
            return list(range(len(self._runs)))
        indices = sorted(
            range(len(self._runs)), key=lambda index: self._runs[index].state != "running"
        )
        return sorted(indices[:_MOST_RUNS])

    def _list_metrics(self) -> list[str]:
        """Return what can be drawn: exact metrics first, and losses first among these."""
        streams = {
            get_chart_name(name): curve.stream
            for run in self._runs
            for name, curve in run.curves.items()
        }
        return sorted(streams, key=lambda name: get_rank(name, streams[name]))

    def _find_wanted(self, names: Sequence[str]) -> str | None:
        """Return the metric that was asked for, once a run has it."""
        wanted = self._wanted
        matches = [name for name in names if name == wanted or name.endswith(f"/{wanted}")]
        return matches[0] if matches else None

    def _get_metric(self) -> str | None:
        names = self._list_metrics()
        if self._wanted is not None:
            return self._find_wanted(names)
        if self._metric is not None:
            return self._metric
        monitored = next((run.monitor[0] for run in self._runs if run.monitor), None)
        if monitored in names:
            return monitored
        return "train/loss" if "train/loss" in names else next(iter(names), None)

    def _get_growing(self, curve: Curve) -> GrowingCurve:
        if curve not in self._curves:
            self._curves[curve] = GrowingCurve(curve)
        return self._curves[curve]

    def _build_table(self) -> Table:
        metric = self._get_metric()
        table = Table(box=None, pad_edge=False, expand=False)
        table.add_column("run", no_wrap=True, overflow="ellipsis", max_width=32)
        has_goodput = any(_GOODPUT in run.curves for run in self._runs)
        goodput = ["goodput"] if has_goodput else []
        for name in ("state", "step", "steps/s", "left", "run time", *goodput, "latest", "best"):
            table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
        shown = self._list_shown()
        for index in shown:
            run = self._runs[index]
            curve = run.curves.get(metric) if metric is not None else None
            table.add_row(
                Text(run.name, _get_colour(index)),
                run.state,
                format_step(run).removeprefix("step ") if run.curves else "",
                format_number(_get_last(run, _RATE)),
                format_seconds(_estimate_rest(run)),
                format_seconds(find_seconds(run) or None),
                *([_format_share(_get_last(run, _GOODPUT))] if has_goodput else []),
                format_number(None if curve is None else curve.last),
                self._format_best(run, metric),
            )
        if len(shown) < len(self._runs):
            table.add_row(Text(f"and {len(self._runs) - len(shown)} more", "dim"))
        return table

    def _format_best(self, run: Run, metric: str | None) -> str:
        """Return the best value of the metric that is drawn, by what the run says of it, or else by
        its name; nothing if neither tells which values are better."""
        curve = run.curves.get(metric) if metric is not None else None
        if curve is None or metric is None:
            return ""
        mode = find_mode(metric)
        if run.monitor is not None and run.monitor[0] == metric:
            mode = run.monitor[1]
        best = None if mode is None else self._get_growing(curve).find_best(mode)
        return "" if best is None else f"{format_number(best[1])} at {best[0]:,}"

    def _build_plot(self, width: int, height: int) -> list[RenderableType]:
        metric = self._get_metric()
        if metric is None:
            missing = "numbers" if self._wanted is None else f"metric {as_printable(self._wanted)}"
            return [Text(f"no {missing} yet", "dim")]
        lines = [
            Line(*self._get_growing(curve).get_points(_DOTS * width), _get_colour(index))
            for index, run in enumerate(self._runs)
            for name, curve in run.curves.items()
            if get_chart_name(name) == metric
        ]
        title = Text(as_printable(metric) + (", logarithmic" if self._log else ""), "bold")
        return [title, draw(lines, width, height, log=self._log)]

    def _build_messages(self) -> list[Text]:
        messages = [
            (message.wall_time, index, message)
            for index, run in enumerate(self._runs)
            for message in run.messages[-_MOST_MESSAGES:]
        ]
        messages.sort(key=lambda item: item[0])
        return [
            Text(
                f"{self._runs[index].name} step {message.step:,}: {message.text}".replace(
                    "\n", " "
                ),
                "dim",
                no_wrap=True,
                overflow="ellipsis",
            )
            for _, index, message in messages[-_MOST_MESSAGES:]
        ]


def _get_colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _get_last(run: Run, name: str) -> float | None:
    curve = run.curves.get(name)
    return None if curve is None else curve.last


def _estimate_rest(run: Run) -> float | None:
    """Return the seconds until the planned end at the newest rate; None if that is not known."""
    rate = _get_last(run, _RATE)
    if run.state != "running" or run.planned_steps is None or not rate or rate <= 0:
        return None
    return max(run.planned_steps - run.step, 0) / rate


def _format_share(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
