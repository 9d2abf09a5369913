"""What `fulgurite watch` shows in a terminal."""

from collections.abc import Sequence

from rich.console import ConsoleDimensions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fulgurite_report.curves import Curve
from fulgurite_report.data import get_chart_name, get_rank
from fulgurite_report.errors import ReportError
from fulgurite_report.lines_of_runs import format_step
from fulgurite_report.plot import Line, draw
from fulgurite_report.run import Run
from fulgurite_report.text import as_printable, format_number, format_seconds

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
        runs: that are shown.
        metric: drawn first, `SOURCE/NAME` or its end; None for the one by which the runs choose
            their best, or a loss.

    Raises:
        ReportError: no run has such a metric.
    """

    def __init__(self, runs: Sequence[Run], metric: str | None = None) -> None:
        self._runs = runs
        self._metric: str | None = None
        self._log = False
        if metric is not None:
            names = self._list_metrics()
            matches = [name for name in names if name == metric or name.endswith(f"/{metric}")]
            if not matches and names:
                raise ReportError(
                    f"no run has a metric {metric}; there are {', '.join(map(as_printable, names))}"
                )
            self._metric = matches[0] if matches else None

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
        return True

    def build(self, size: ConsoleDimensions, *, has_keys: bool = True) -> RenderableType:
        """Return the view.

        Args:
            size: of the terminal.
            has_keys: whether keys do something, which the last line then says.
        """
        table = self._build_table()
        messages = self._build_messages()
        num_rows = len(self._runs[:_MOST_RUNS]) + 1 + len(messages)
        height = max(size.height - num_rows - 6, _FEWEST_ROWS)
        plot = self._build_plot(size.width, height)
        keys = [Text("Tab next metric   l logarithmic   q quit", "dim")] if has_keys else []
        return Group(table, Text(), *plot, *messages, *keys)

    def _list_metrics(self) -> list[str]:
        """Return what can be drawn: exact metrics first, and losses first among these."""
        streams = {
            get_chart_name(name): curve.stream
            for run in self._runs
            for name, curve in run.curves.items()
        }
        return sorted(streams, key=lambda name: get_rank(name, streams[name]))

    def _get_metric(self) -> str | None:
        if self._metric is not None:
            return self._metric
        monitored = next((run.monitor[0] for run in self._runs if run.monitor), None)
        names = self._list_metrics()
        if monitored in names:
            return monitored
        return "train/loss" if "train/loss" in names else next(iter(names), None)

    def _build_table(self) -> Table:
        metric = self._get_metric()
        table = Table(box=None, pad_edge=False, expand=False)
        table.add_column("run", no_wrap=True, overflow="ellipsis", max_width=32)
        has_goodput = any(_GOODPUT in run.curves for run in self._runs)
        goodput = ["goodput"] if has_goodput else []
        for name in ("state", "step", "steps/s", "left", "time", *goodput, "latest", "best"):
            table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
        for index, run in enumerate(self._runs[:_MOST_RUNS]):
            curve = run.curves.get(metric) if metric is not None else None
            table.add_row(
                Text(run.name, _get_colour(index)),
                run.state,
                format_step(run).removeprefix("step ") if run.curves else "",
                format_number(_get_last(run, _RATE)),
                format_seconds(_estimate_rest(run)),
                format_seconds(run.seconds or None),
                *([_format_share(_get_last(run, _GOODPUT))] if has_goodput else []),
                format_number(None if curve is None else curve.last),
                _format_best(run, metric),
            )
        return table

    def _build_plot(self, width: int, height: int) -> list[RenderableType]:
        metric = self._get_metric()
        if metric is None:
            return [Text("no numbers yet", "dim")]
        lines = [
            _thin(curve, width, _get_colour(index))
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


def _format_best(run: Run, metric: str | None) -> str:
    """Return the best value of the metric that is drawn: the largest if the run maximizes it, and
    else the smallest, unless it is an accuracy."""
    curve = run.curves.get(metric) if metric is not None else None
    if curve is None or metric is None:
        return ""
    mode = "max" if metric.endswith("accuracy") else "min"
    if run.monitor is not None and run.monitor[0] == metric:
        mode = run.monitor[1]
    best = curve.find_best(mode)
    return "" if best is None else f"{format_number(best[1])} at {best[0]:,}"


def _thin(curve: Curve, width: int, style: str) -> Line:
    steps, values = curve.thin(_DOTS * width)
    return Line(steps.tolist(), values.tolist(), style)
