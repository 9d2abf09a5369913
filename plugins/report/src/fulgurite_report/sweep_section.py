"""The section of the page about sweeps: the best trial, what decides it, and a line for each."""

from collections.abc import Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

from fulgurite_report.errors import ReportError
from fulgurite_report.html import add, add_section
from fulgurite_report.run import Run
from fulgurite_report.sweeps import Axis, Sweep, Trial, is_sweep, read_sweep
from fulgurite_report.text import as_printable

_SPACING = 170
_TOP, _BOTTOM = 40, 280
_MARGIN = 90
_MOST_TRIALS = 2_000
_LONGEST_MARK = 18
_FAINTEST = 0.15

Indices = dict[tuple[Path, str], int]
"""The index of each run, by the directory of its sweep and by its name there."""


def add_sweeps(main: Element, runs: Sequence[Run]) -> None:
    """Add what is known of the sweeps of which there are runs in the page."""
    indices = {
        (run.path.absolute().parent, run.path.absolute().name): index
        for index, run in enumerate(runs)
    }
    folders = [folder for folder in dict.fromkeys(path for path, _ in indices) if is_sweep(folder)]
    if not folders:
        return
    section = add_section(main, "sweep", "Sweep" if len(folders) == 1 else "Sweeps")
    for folder in folders:
        if len(folders) > 1:
            add(section, "h3", as_printable(folder.name))
        try:
            sweep = read_sweep(folder)
        except ReportError as error:
            add(section, "p", as_printable(str(error)), class_="note")
            continue
        _add_best(section, sweep, indices)
        _add_importances(section, sweep)
        _add_chart(section, sweep, indices)


def _add_best(section: Element, sweep: Sweep, indices: Indices) -> None:
    """Add the best trial, and how to train it again.

    Args:
        section: to which it is added.
        sweep: it.
        indices: of the runs.
    """
    trials = {trial.run: trial for trial in sweep.trials}
    best = trials.get(sweep.best or "")
    if best is None:
        add(section, "p", "No trial is complete yet that violates no constraint.", class_="note")
        return
    line = add(section, "p", f"The best is {best.describe(sweep.metrics)}.")
    _set_run(line, sweep, best, indices)
    if len(sweep.objectives) > 1:
        names = ", ".join(as_printable(name) for name in sweep.front)
        text = f"It is so by {as_printable(sweep.metrics[0])}; none is better by all metrics than: "
        add(section, "p", f"{text}{names}.")
    if sweep.command:
        add(section, "p", "To train it again alone:", class_="note")
        add(section, "pre", as_printable(sweep.command))


def _add_importances(section: Element, sweep: Sweep) -> None:
    """Add a bar for each argument.

    Args:
        section: to which they are added.
        sweep: with or without importances.
    """
    if not sweep.importances:
        text = (
            "There are no importances: they need ten complete trials, of values that Fulgurite has "
            "chosen."
        )
        add(section, "p", text, class_="note")
        return
    add(section, "h3", "Importance")
    note = (
        "How far the values of the best trials differ from those of all complete ones, by Optuna's "
        "PED-ANOVA, as shares of all."
    )
    add(section, "p", note, class_="note")
    for name, share in sorted(sweep.importances.items(), key=lambda item: -item[1]):
        figure = add(section, "figure")
        add(figure, "figcaption", f"{as_printable(name)} {share:.0%}")
        box = add(
            figure,
            "svg",
            viewBox="0 0 1000 20",
            preserveAspectRatio="none",
            aria_hidden="true",
        )
        add(
            box, "rect", x="0", y="0", width=f"{1000 * share:.1f}", height="20", class_="part-steps"
        )


def _add_chart(section: Element, sweep: Sweep, indices: Indices) -> None:
    """Add a line for each trial through its values: parallel coordinates.

    Args:
        section: to which they are added.
        sweep: it.
        indices: of the runs.
    """
    ended = [trial for trial in sweep.trials if trial.state in ("complete", "pruned")]
    if not ended:
        return
    best = [trial for trial in ended[:-_MOST_TRIALS] if trial.run == sweep.best]
    trials = best + ended[-_MOST_TRIALS:]
    add(section, "h3", "Parallel coordinates")
    note = (
        "A line for each trial, the stronger the better; the best one is thick, pruned ones are "
        "dashed. Better values of a metric are at the top. Point at a line to read it."
    )
    if len(trials) < len(ended):
        note += f" Of {len(ended)} trials these are the best and the newest."
    add(section, "p", note, class_="note")
    axes = [*sweep.axes, *_build_metric_axes(sweep, trials)]
    width = 2 * _MARGIN + _SPACING * (len(axes) - 1)
    scroll = add(section, "div", class_="scroll", tabindex="0")
    chart = add(scroll, "svg", viewBox=f"0 0 {width} {_BOTTOM + 30}", class_="parallel", role="img")
    chart.set("width", str(width))
    strengths = _rank(sweep, trials)
    # The best is drawn over all others.
    for trial in sorted(trials, key=lambda trial: (trial.run == sweep.best, strengths[trial.run])):
        path = add(
            chart,
            "path",
            d=_draw(_find_places(sweep, trial, axes)),
            class_="best" if trial.run == sweep.best else trial.state,
            stroke_opacity=f"{strengths[trial.run]:.2f}",
        )
        _set_run(path, sweep, trial, indices)
        add(path, "title", trial.describe(sweep.metrics))
    for index, axis in enumerate(axes):
        _add_axis(chart, axis, _MARGIN + _SPACING * index)


def _build_metric_axes(sweep: Sweep, trials: Sequence[Trial]) -> list[Axis]:
    """Return an axis for each objective, with the better values at the top.

    Args:
        sweep: it.
        trials: that are shown.
    """
    axes = []
    for index, (metric, is_minimized) in enumerate(sweep.objectives):
        values = [trial.get_value(index) for trial in trials]
        numbers = [value for value in values if value is not None] or [0.0]
        low, high = min(numbers), max(numbers)
        axes.append(Axis(metric, high, low) if is_minimized else Axis(metric, low, high))
    return axes


def _find_places(sweep: Sweep, trial: Trial, axes: Sequence[Axis]) -> list[float | None]:
    """Return where a trial is on each axis.

    Args:
        sweep: it.
        trial: of it.
        axes: those of what is searched, and those of metrics behind them.
    """
    values = [trial.params.get(axis.name) for axis in sweep.axes]
    values += [trial.get_value(index) for index in range(len(sweep.objectives))]
    return [axis.find_place(value) for axis, value in zip(axes, values, strict=True)]


def _rank(sweep: Sweep, trials: Sequence[Trial]) -> dict[str, float]:
    """Return how strong the line of each trial is, by its rank among all.

    Args:
        sweep: it.
        trials: that are shown.
    """
    _, is_minimized = sweep.objectives[0]

    def get_loss(trial: Trial) -> float:
        value = trial.get_value(0)
        if value is None or trial.violations:
            return float("inf")
        return value if is_minimized else -value

    ordered = sorted(trials, key=get_loss, reverse=True)
    most = max(len(ordered) - 1, 1)
    return {
        trial.run: _FAINTEST + (1 - _FAINTEST) * (index / most) ** 2
        for index, trial in enumerate(ordered)
    }


def _draw(places: Sequence[float | None]) -> str:
    """Return the path of a line, which has a gap where the trial has no value.

    Args:
        places: where the trial is on each axis.
    """
    parts = []
    letter = "M"
    for index, place in enumerate(places):
        if place is None:
            letter = "M"
            continue
        x = _MARGIN + _SPACING * index
        parts.append(f"{letter}{x} {_BOTTOM - place * (_BOTTOM - _TOP):.1f}")
        letter = "L"
    return "".join(parts)


def _add_axis(chart: Element, axis: Axis, x: int) -> None:
    """Add a vertical line with its name and its marks.

    Args:
        chart: to which it is added.
        axis: what it shows.
        x: where it is.
    """
    add(chart, "line", x1=str(x), x2=str(x), y1=str(_TOP), y2=str(_BOTTOM))
    add(chart, "text", _shorten(axis.name), x=str(x), y="16", text_anchor="middle", class_="name")
    for place, text in axis.list_marks():
        y = _BOTTOM - place * (_BOTTOM - _TOP)
        add(chart, "text", _shorten(text), x=str(x + 6), y=f"{y + 4:.1f}")


def _shorten(text: str) -> str:
    printable = as_printable(text)
    return printable if len(printable) <= _LONGEST_MARK else f"{printable[:_LONGEST_MARK]}…"


def _set_run(element: Element, sweep: Sweep, trial: Trial, indices: Indices) -> None:
    """Have an element hide with the run of a trial.

    Args:
        element: of the page.
        sweep: it.
        trial: of it.
        indices: of the runs.
    """
    index = indices.get((sweep.folder, trial.run))
    if index is not None:
        element.set("data-run", str(index))
