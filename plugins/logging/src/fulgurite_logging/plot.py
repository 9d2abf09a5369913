"""`fulgurite plot`: metrics of runs over steps, as a picture."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fulgurite import encoding
from fulgurite.errors import ConfigurationError, did_you_mean

from fulgurite_logging.jsonl import EXACT

LONGEST_LINE = 1 << 24
Series = dict[str, tuple[list[int], list[float]]]


def command(arguments: list[str]) -> int:
    """`fulgurite plot RUN [RUN ...] --metric loss --out loss.png`."""
    parser = argparse.ArgumentParser("fulgurite plot", description="Draws metrics of runs over steps.")
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="directories of runs, or their records.jsonl")
    parser.add_argument(
        "--metric",
        action="append",
        metavar="NAME",
        help="such as train/loss, or loss for that of every source; may be given several times (default loss)",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="a .png, .svg or .pdf file")
    parser.add_argument("--log", action="store_true", help="a logarithmic axis")
    options = parser.parse_args(arguments)
    try:
        draw(options.runs, options.metric or ["loss"], options.out, log=options.log)
    except (ConfigurationError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def draw(runs: Sequence[Path], metrics: Sequence[str], out: Path, *, log: bool = False) -> None:
    """Writes a figure with a line for each metric of each run; matplotlib is imported here."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("plots need matplotlib: pip install 'fulgurite-logging[plot]'") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", yscale="log" if log else "linear")
    for run in runs:
        found = series(run)
        known = {*found, *(name.partition("/")[2] for name in found)}
        for metric in metrics:
            names = [name for name in found if name == metric or name.partition("/")[2] == metric]
            if not names:
                raise ConfigurationError(f"{run} has no metric {metric!r}. {did_you_mean(metric, known)}")
            for name in names:
                steps, values = found[name]
                label = name if len(runs) == 1 else f"{run.name} {name}"
                axes.plot(steps, values, label=label, linewidth=1.2, marker="." if len(steps) < 30 else "")
    if len(metrics) == 1:
        axes.set_ylabel(metrics[0])
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    if out.suffix.removeprefix(".").lower() not in figure.canvas.get_supported_filetypes():
        kinds = ", ".join(sorted(figure.canvas.get_supported_filetypes()))
        raise ConfigurationError(f"{out} is no kind of picture: choose one of {kinds}")
    figure.savefig(out, dpi=150)


def series(run: Path) -> Series:
    """The exact scalars of a run that are single numbers, by `SOURCE/NAME`: steps and values."""
    found: Series = {}
    for record in records(run / EXACT if run.is_dir() else run):
        for name, value in record["values"].items() if record["kind"] == "scalars" else ():
            if isinstance(value, int | float):
                steps, values = found.setdefault(f"{record['source']}/{name}", ([], []))
                steps.append(record["step"])
                values.append(float(value))
    return found


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, one by one. A last line that is not whole is left out: a run may be writing it."""
    if not path.is_file():
        raise ConfigurationError(f"there is no {path}: give the directory of a run that was logged with 'jsonl'")
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(LONGEST_LINE):
            number += 1
            if not line.endswith(b"\n"):
                if len(line) < LONGEST_LINE:
                    return
                raise ConfigurationError(f"{path}, line {number}: longer than {LONGEST_LINE} bytes")
            try:
                record = encoding.loads(line)
                whole = isinstance(record["values"], dict) and isinstance(record["source"], str)
                if not whole or type(record["step"]) is not int or not isinstance(record["kind"], str):
                    raise ValueError("it lacks kind, source, step or values")
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                raise ConfigurationError(f"{path}, line {number}: no record: {error}") from error
            yield record
