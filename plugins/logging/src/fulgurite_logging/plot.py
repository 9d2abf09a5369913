"""`fulgurite plot`: metrics of runs over steps, as a picture."""

import argparse
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from fulgurite.errors import ConfigurationError, did_you_mean
from fulgurite.plugins import as_printable
from fulgurite_runs import as_float, hash_commit

from fulgurite_logging.reading import iter_lines, iter_records

Series = dict[str, tuple[list[int], list[float]]]


def main(arguments: list[str]) -> int:
    """Draw metrics of runs over steps.

    The command `fulgurite plot RUN [RUN ...] --metric loss --out loss.png`; returns its exit code.
    """
    parser = argparse.ArgumentParser(
        "fulgurite plot", description="Draws metrics of runs over steps."
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        type=Path,
        help="directories of runs, or their records.jsonl",
    )
    parser.add_argument(
        "--metric",
        action="append",
        metavar="NAME",
        help=(
            "such as train/loss, or loss for that of every source; may be given several times "
            "(default loss)"
        ),
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, required=True, help="a .png, .svg or .pdf file"
    )
    parser.add_argument("--log", action="store_true", help="a logarithmic axis")
    options = parser.parse_args(arguments)
    try:
        plot_runs(options.runs, options.metric or ["loss"], options.out, log=options.log)
    except (ConfigurationError, OSError) as error:
        print(as_printable(f"error: {error}"), file=sys.stderr)
        return 2
    print(f"wrote {options.out}")
    return 0


def plot_runs(
    runs: Sequence[Path], metrics: Sequence[str], out: Path, *, log: bool = False
) -> None:
    """Write a figure with a line for each metric of each run.

    Args:
        runs: directories of runs, or their files of records.
        metrics: names such as `train/loss`, or `loss` for that of every source.
        out: the picture; its suffix decides the format.
        log: whether the vertical axis is logarithmic.

    Raises:
        ConfigurationError: matplotlib is not installed, a run has no such metric, or a file cannot
            be read.
    """
    try:
        # Imported here, because only this command needs it.
        import matplotlib.figure
    except ImportError as error:
        raise ConfigurationError(
            "plots need matplotlib: pip install 'fulgurite-logging[plot]'"
        ) from error
    with matplotlib.rc_context():
        if Path(matplotlib.matplotlib_fname()).absolute().parent == Path.cwd():
            # The current directory may be anybody's, and settings name commands, such as TeX.
            matplotlib.rcdefaults()
        # A name is a string: between dollar signs in it there is no formula.
        matplotlib.rcParams.update({"text.parse_math": False, "text.usetex": False})
        _draw(runs, metrics, out, log=log)


def _draw(runs: Sequence[Path], metrics: Sequence[str], out: Path, *, log: bool) -> None:
    """Write a figure as `plot_runs` does, with the settings of matplotlib that are in force.

    Args:
        runs: directories of runs, or their files of records.
        metrics: names such as `train/loss`.
        out: the picture.
        log: whether the vertical axis is logarithmic.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", yscale="log" if log else "linear")
    for run in runs:
        series = load_series(run)
        for metric in metrics:
            for name in _match_names(run, metric, series):
                steps, values = series[name]
                label = name if len(runs) == 1 else f"{run.name} {name}"
                marker = "." if len(steps) < 30 else ""
                axes.plot(steps, values, label=as_printable(label), linewidth=1.2, marker=marker)
    if len(metrics) == 1:
        axes.set_ylabel(metrics[0])
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    formats = figure.canvas.get_supported_filetypes()
    if out.suffix.removeprefix(".").lower() not in formats:
        raise ConfigurationError(
            f"{out} is not a kind of picture that can be written: choose one of "
            f"{', '.join(sorted(formats))}"
        )
    figure.savefig(out, dpi=150)


def _match_names(run: Path, metric: str, series: Series) -> list[str]:
    """Return the names `SOURCE/NAME` that are `metric` or end in it."""
    short_names = {name: name.partition("/")[2] for name in series}
    names = [name for name, short_name in short_names.items() if metric in (name, short_name)]
    if not names:
        known = {*series, *short_names.values()}
        raise ConfigurationError(f"{run} has no metric {metric!r}. {did_you_mean(metric, known)}")
    return names


def load_series(run: Path) -> Series:
    """Return the steps and values, by `SOURCE/NAME`, of the exact scalars of a run that are single
    numbers; the results of evaluators that ran in processes of their own are among them."""
    rows = (
        (record.source, record.step, record.values)
        for record in iter_records(run)
        if record.kind == "scalars"
    )
    series: Series = {}
    for source, step, values in chain(rows, load_evaluations(run)):
        for name, value in values.items():
            if isinstance(value, int | float):
                steps, numbers = series.setdefault(f"{source}/{name}", ([], []))
                steps.append(step)
                numbers.append(as_float(value))
    return series


def load_evaluations(run: Path) -> list[tuple[str, int, dict[str, Any]]]:
    """Return evaluator, step and metrics of what `fulgurite evaluate --group` wrote into the
    directory of a run.

    Of several results of a step only the newest counts, and those of checkpoints that a later
    attempt has superseded are left out.
    """
    superseded = _hash_commits(run, "superseded/*")
    # There, if `checkpoints` is a mount of its own.
    superseded |= _hash_commits(run, "checkpoints/superseded/*")
    current = _hash_commits(run, "checkpoints")
    types = {"evaluator": str, "step": int, "commit": str, "metrics": dict}
    metrics: dict[tuple[str, int], dict[str, Any]] = {}
    for path in sorted(run.glob("evaluations/*.jsonl")):
        for result in iter_lines(path, "result", types):
            commit = result["commit"]
            if commit in current or commit not in superseded:
                metrics[result["evaluator"], result["step"]] = result["metrics"]
    return [(name, step, metrics[name, step]) for name, step in sorted(metrics)]


def _hash_commits(run: Path, folder: str) -> set[str]:
    """Return the digests that results name checkpoints by."""
    digests = map(hash_commit, run.glob(f"{folder}/step-*"))
    return {digest for digest in digests if digest is not None}
