"""The commands `fulgurite report` and `fulgurite watch`."""

import argparse
import sys
from pathlib import Path

from fulgurite_report.errors import ReportError
from fulgurite_report.text import as_printable


def report(arguments: list[str]) -> int:
    """Write a page about runs: curves, differences, times, messages.

    Args:
        arguments: the command line after the name of the command.
    """
    parser = argparse.ArgumentParser(
        "fulgurite report",
        description="Writes one page of HTML about runs, for a browser without a network.",
    )
    _add_runs(parser)
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="the page, replaced if it is there (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    from fulgurite_report.page import write_report

    try:
        write_report(options.runs, options.out)
    except (ReportError, OSError) as error:
        return _print_error(error)
    print(as_printable(f"wrote {options.out}, {options.out.stat().st_size / 1e6:.2f} MB"))
    return 0


def watch(arguments: list[str]) -> int:
    """Show runs in the terminal while they train.

    Args:
        arguments: the command line after the name of the command.
    """
    parser = argparse.ArgumentParser(
        "fulgurite watch",
        description="Shows runs in the terminal, from their files, until all have ended. In a pipe "
        "it prints lines.",
        epilog="keys: Tab next metric, l logarithmic, q quit",
    )
    _add_runs(parser)
    parser.add_argument(
        "--metric", metavar="NAME", help="which to draw first, such as test/loss or loss"
    )
    parser.add_argument(
        "--every",
        type=_parse_seconds,
        default=2.0,
        metavar="SECONDS",
        help="how often the files are looked at (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    from fulgurite_report.watching import watch_runs

    try:
        watch_runs(options.runs, metric=options.metric, interval=options.every)
    except (ReportError, OSError) as error:
        return _print_error(error)
    return 0


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="the directory of a run, or one that holds runs, such as that of a sweep",
    )


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not an interval: give 0.1 to 3600 seconds")
    return seconds


def _print_error(error: Exception) -> int:
    print(as_printable(f"error: {error}"), file=sys.stderr)
    return 2
