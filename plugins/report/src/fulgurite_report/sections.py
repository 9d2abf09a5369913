"""The sections of the page that say how well the runs did: summary, differences, curves, values."""

from collections.abc import Sequence
from xml.etree.ElementTree import Element

import numpy as np

from fulgurite_report.data import MOST_OF_A_CURVE, get_budget
from fulgurite_report.differences import list_arguments_that_differ, list_differences
from fulgurite_report.findings import list_findings
from fulgurite_report.html import (
    Cell,
    add,
    add_section,
    add_swatch,
    add_table,
    make_counts,
    make_number,
)
from fulgurite_report.run import Run
from fulgurite_report.text import as_printable, format_number, format_seconds
from fulgurite_report.timing import find_seconds

_TELEMETRY = {
    "train/steps_per_second": "steps/s",
    "throughput/examples_per_second": "examples/s",
    "throughput/mfu": "MFU",
    "goodput/goodput": "goodput",
}
"""What the summary shows of the telemetry of runs that have it, and under which name."""
_SHARES = ("throughput/mfu", "goodput/goodput")
_MOST_ARGUMENTS = 8
_MOST_METRICS = 6
_LONGEST = 40
"""Characters of the name or the value of an argument in the summary."""


def add_summary(main: Element, runs: Sequence[Run]) -> None:
    """Add a table with a row for each run."""
    section = add_section(main, "summary", "Summary")
    _add_findings(section, runs)
    arguments = list_arguments_that_differ(runs)[:_MOST_ARGUMENTS]
    metrics = _list_main_metrics(runs)
    telemetry = [name for name in _TELEMETRY if any(name in run.curves for run in runs)]
    header: list[Cell | str] = ["run", "state", "step", "of", "attempts", "run time"]
    header += [*(_TELEMETRY[name] for name in telemetry), "best", "at"]
    header += [_name_cell(as_printable(name)) for name in metrics]
    header += [_name_cell(argument.name, "\n".join(argument.paths)) for argument in arguments]
    rows = []
    for index, run in enumerate(runs):
        row: list[Cell | str] = [Cell(run.name, run=index, swatch=True), run.state]
        row += make_counts(run.step) if run.curves or run.checkpoints else [""]
        row += make_counts(run.planned_steps) + make_counts(len(run.attempts) or None)
        seconds = find_seconds(run)
        row.append(Cell(format_seconds(seconds or None), seconds))
        row += [*(_last_cell(run, name) for name in telemetry), *_best_cells(run)]
        row += [_last_cell(run, name) for name in metrics]
        row += [_argument_cell(argument.values[index]) for argument in arguments]
        rows.append(row)
    add_table(section, header, rows, list(range(len(runs))))
    _add_notices(section, runs)


def _add_findings(section: Element, runs: Sequence[Run]) -> None:
    findings = add(section, "ul", class_="findings")
    for finding in list_findings(runs):
        item = add(findings, "li", finding.text)
        if finding.run is not None:
            item.text = ""
            item.set("data-run", str(finding.run))
            add_swatch(item, finding.run).tail = finding.text


def _add_notices(section: Element, runs: Sequence[Run]) -> None:
    notices = add(section, "ul", class_="notices")
    for index, run in enumerate(runs):
        texts = list(run.problems)
        if run.state == "new":
            texts.append("has not begun: there is no attempt in its directory")
        elif not run.curves:
            texts.append("has no records of numbers: they come with the plugin 'jsonl'")
        if run.state == "running":
            texts.append("is running: make the page again for what is new")
        if run.state == "killed":
            texts.append("was killed: it never recorded that it ended")
        texts += _describe_nonfinite(run)
        for text in texts:
            item = add(notices, "li", data_run=str(index))
            add_swatch(item, index).tail = f"{run.name}: {text}"


def _describe_nonfinite(run: Run) -> list[str]:
    texts = []
    for name, curve in run.curves.items():
        bad = np.flatnonzero(~np.isfinite(np.frombuffer(curve.values)))
        if len(bad):
            step = curve.steps[int(bad[0])]
            texts.append(
                f"{as_printable(name)} is not finite at {len(bad):,} of {len(curve.steps):,} "
                f"points, first at step {step:,}"
            )
    return texts


def add_differences(main: Element, runs: Sequence[Run]) -> None:
    """Add a table of what differs in what the runs are made of."""
    if len(runs) < 2:
        return
    section = add_section(
        main, "differences", "Differences", "Arguments, settings, plugins, versions, program, model"
    )
    rows = list_differences(runs)
    if not rows:
        add(section, "p", "There are none.")
        return
    header = ["", *(Cell(run.name, run=index, swatch=True) for index, run in enumerate(runs))]
    cells = [
        [name, *(Cell(value, run=index) for index, value in enumerate(values))]
        for name, values in rows
    ]
    add_table(section, header, cells)


def add_curves(main: Element, runs: Sequence[Run]) -> None:
    """Add the place where the script draws charts."""
    num_curves = sum(len(run.curves) for run in runs)
    budget = get_budget(num_curves)
    num_thinned = sum(len(curve.steps) > budget for run in runs for curve in run.curves.values())
    note = "Drag to zoom, double-click to reset. "
    if num_thinned:
        note += (
            f"{num_thinned} of {num_curves} curves have more points than a screen can show: each "
            f"is divided into {budget // 2:,} parts, and of each part only the smallest and the "
            "largest value are here, at their steps. "
        )
        if budget < MOST_OF_A_CURVE:
            note += "Fewer runs in a page leave room for more of each. "
    section = add_section(main, "curves", "Curves", note)
    if not num_curves:
        add(section, "p", "There are no records of numbers.")
    add(section, "div", id="charts")


def add_values(main: Element, runs: Sequence[Run]) -> None:
    """Add a table of the newest, smallest and largest values; those of evaluations come first."""
    section = add_section(main, "values", "Evaluations and other values")
    rows = []
    indices = []
    streams = {name: curve.stream for run in runs for name, curve in run.curves.items()}
    for name in sorted(streams, key=lambda name: _get_place(name, streams[name])):
        for index, run in enumerate(runs):
            curve = run.curves.get(name)
            if curve is None:
                continue
            row: list[Cell | str] = [as_printable(name), Cell(run.name, run=index, swatch=True)]
            row += [make_number(curve.last), *make_counts(curve.steps[-1])]
            for mode in ("min", "max"):
                best = curve.find_best(mode)
                row += ["", ""] if best is None else [make_number(best[1]), *make_counts(best[0])]
            rows.append([*row, *make_counts(len(curve.steps))])
            indices.append(index)
    header = ["name", "run", "latest", "at", "min", "at", "max", "at", "points"]
    if rows:
        add_table(section, header, rows, indices)
    else:
        add(section, "p", "There are none.")


def _get_place(name: str, stream: str) -> tuple[bool, bool, str]:
    """Return where a metric stands: evaluations, training, telemetry."""
    return stream != "exact", name.startswith("train/"), name


def _list_main_metrics(runs: Sequence[Run]) -> list[str]:
    """Return a few names of exact numbers to show of each run: evaluations and the loss."""
    names = dict.fromkeys(
        name
        for run in runs
        for name, curve in run.curves.items()
        if curve.stream == "exact" and not name.endswith("]")
    )
    evaluations = [name for name in names if not name.startswith("train/")]
    return [*evaluations, *(name for name in ("train/loss",) if name in names)][:_MOST_METRICS]


def _best_cells(run: Run) -> list[Cell | str]:
    """Return the best value of the metric that a run monitors, and its step."""
    monitor = run.monitor
    curve = run.curves.get(monitor[0]) if monitor is not None else None
    best = None if curve is None or monitor is None else curve.find_best(monitor[1])
    if best is None or monitor is None:
        return ["", ""]
    text = f"{as_printable(monitor[0])} {format_number(best[1])}"
    return [Cell(text, best[1]), *make_counts(best[0])]


def _last_cell(run: Run, name: str) -> Cell | str:
    curve = run.curves.get(name)
    if curve is None:
        return ""
    if name in _SHARES:
        return Cell(f"{curve.last:.1%}", curve.last)
    return make_number(curve.last)


def _name_cell(name: str, title: str = "") -> Cell:
    """Return a cell with the name of a column, of which the middle of a long one is cut out.

    Args:
        name: of the column.
        title: what it is short for; by default the whole name, if that is cut.
    """
    clipped = _clip(name)
    return Cell(clipped, title=title or ("" if clipped == name else name))


def _argument_cell(value: str) -> Cell:
    """Return a cell with the value of an argument; a long one is cut, and whole in its title."""
    clipped = _clip(value)
    return Cell(clipped, _as_number(value), title="" if clipped == value else value)


def _clip(text: str) -> str:
    """Return a string without its middle if it is long."""
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]}…{text[-half:]}"


def _as_number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None
