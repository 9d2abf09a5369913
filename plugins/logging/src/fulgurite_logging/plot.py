"""`fulgurite plot`: metrics of runs over steps, as a picture."""

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from fulgurite.errors import ConfigurationError, did_you_mean
from fulgurite_runs import json_codec

from fulgurite_logging.jsonl import EXACT

LONGEST_LINE = 1 << 24
FOLDERS = ("superseded/*", "checkpoints")
Series = dict[str, tuple[list[int], list[float]]]


def command(arguments: list[str]) -> int:
    """`fulgurite plot RUN [RUN ...] --metric loss --out loss.png`."""
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
        raise ConfigurationError(
            "plots need matplotlib: pip install 'fulgurite-logging[plot]'"
        ) from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", yscale="log" if log else "linear")
    for run in runs:
        found = series(run)
        known = {*found, *(name.partition("/")[2] for name in found)}
        for metric in metrics:
            names = [name for name in found if name == metric or name.partition("/")[2] == metric]
            if not names:
                raise ConfigurationError(
                    f"{run} has no metric {metric!r}. {did_you_mean(metric, known)}"
                )
            for name in names:
                steps, values = found[name]
                label = name if len(runs) == 1 else f"{run.name} {name}"
                axes.plot(
                    steps, values, label=label, linewidth=1.2, marker="." if len(steps) < 30 else ""
                )
    if len(metrics) == 1:
        axes.set_ylabel(metrics[0])
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    if out.suffix.removeprefix(".").lower() not in figure.canvas.get_supported_filetypes():
        kinds = ", ".join(sorted(figure.canvas.get_supported_filetypes()))
        raise ConfigurationError(f"{out} is no kind of picture: choose one of {kinds}")
    figure.savefig(out, dpi=150)


def series(run: Path) -> Series:
    """The exact scalars of a run that are single numbers, by `SOURCE/NAME`: steps and values. What
    evaluators in processes of their own found is among them."""
    found: Series = {}
    rows = (
        (one["source"], one["step"], one["values"])
        for one in records(run)
        if one["kind"] == "scalars"
    )
    for source, step, values in chain(rows, evaluations(run)):
        for name, value in values.items():
            if isinstance(value, int | float):
                steps, numbers = found.setdefault(f"{source}/{name}", ([], []))
                steps.append(step)
                numbers.append(float(value))
    return found


def records(run: Path) -> Iterator[dict[str, Any]]:
    """The records of a run, or of a file, one by one."""
    path = run / EXACT if run.is_dir() else run
    if not path.is_file():
        raise ConfigurationError(
            f"there is no {path}: give the directory of a run that was logged with 'jsonl'"
        )
    return _lines(path, "record", {"kind": str, "source": str, "step": int, "values": dict})


def evaluations(run: Path) -> list[tuple[str, int, dict[str, Any]]]:
    """Evaluator, step and metrics of the results that `fulgurite evaluate --group` wrote into the
    directory of a run, the newest of each step, but those of checkpoints that a later attempt set
    aside."""
    aside, there = (
        {_digest(path) for path in run.glob(f"{where}/step-*/COMMIT")} for where in FOLDERS
    )
    found = {}
    for file in sorted(run.glob("evaluations/*.jsonl")):
        for one in _lines(
            file, "result", {"evaluator": str, "step": int, "commit": str, "metrics": dict}
        ):
            if one["commit"] in there or one["commit"] not in aside:
                found[one["evaluator"], one["step"]] = one["metrics"]
    return [(name, step, found[name, step]) for name, step in sorted(found)]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _lines(path: Path, what: str, members: dict[str, type]) -> Iterator[dict[str, Any]]:
    """The lines of a file, which have these members. A last one that is not whole is left out: a
    run may be writing it."""
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(LONGEST_LINE):
            number += 1
            if not line.endswith(b"\n"):
                if len(line) < LONGEST_LINE:
                    return
                raise ConfigurationError(f"{path}, line {number}: longer than {LONGEST_LINE} bytes")
            try:
                one = json_codec.loads(line)
                if not all(type(one[name]) is kind for name, kind in members.items()):
                    raise ValueError(f"it lacks {', '.join(members)}")
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                raise ConfigurationError(f"{path}, line {number}: no {what}: {error}") from error
            yield one
