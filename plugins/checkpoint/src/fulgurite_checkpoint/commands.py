"""The commands `fulgurite runs`, `fulgurite compare` and `fulgurite checkpoints`.

They only read, except `average`, which writes a new run directory.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from fulgurite.errors import FulguriteError
from fulgurite.plugins import as_printable
from fulgurite_runs import dumps

from fulgurite_checkpoint import averaging, comparing, inspecting, listing


def runs(arguments: list[str]) -> int:
    """List the runs in a directory, and the arguments that differ between them.

    Args:
        arguments: the command line after the name of the command.
    """
    parser = argparse.ArgumentParser(
        "fulgurite runs",
        description="Lists the runs in DIR, or DIR if it is one, with the arguments that differ.",
        epilog="NAME is an argument of the program, a metric such as test/accuracy at the newest "
        "checkpoint, or a column.",
    )
    parser.add_argument("directory", metavar="DIR", nargs="?", default=".", type=Path)
    parser.add_argument(
        "--where",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="only runs for which this holds; also with !=, <, <=, > and >=; may be repeated",
    )
    parser.add_argument(
        "--sort", metavar="NAME", help="order by NAME; -NAME, as in --sort=-NAME, largest first"
    )
    parser.add_argument(
        "--show", metavar="NAME", action="append", default=[], help="a column more; may be repeated"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--csv", action="store_true", help="as comma-separated values")
    output.add_argument("--json", action="store_true", help="as JSON, with everything")
    options = parser.parse_args(arguments)

    def print_runs() -> int:
        rows = listing.list_runs(options.directory)
        names = list(options.show)
        for name in names:
            comparing.check_name(rows, name)
        if options.sort is not None:
            rows = comparing.sort_runs(rows, options.sort)
            names.append(options.sort.removeprefix("-"))
        rows = comparing.select_runs(rows, options.where)
        columns = comparing.build_columns(listing.RUN_COLUMNS, rows, names)
        if options.json:
            listing.print_json(rows)
        elif options.csv:
            listing.print_csv(rows, columns)
        else:
            listing.print_table(rows, columns)
        return 0

    return _run_command(print_runs)


def compare(arguments: list[str]) -> int:
    """Show what differs between two runs.

    Args:
        arguments: the command line after the name of the command.
    """
    parser = argparse.ArgumentParser(
        "fulgurite compare",
        description="Shows what differs between two runs: arguments, settings, plugins, versions, "
        "devices, program, model, and the metrics at their newest checkpoints. The exit code is 1 "
        "if anything does.",
    )
    parser.add_argument("runs", metavar="RUN", nargs=2, type=Path)
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)

    def print_differences() -> int:
        rows = comparing.compare_runs(*options.runs)
        first, second = map(str, options.runs)
        if options.json:
            by_name = {name: {first: left, second: right} for name, left, right in rows}
            print(json.dumps(by_name, indent=2))
        elif rows:
            columns: listing.Columns = {
                "": lambda row: row[0],
                first: lambda row: row[1],
                second: lambda row: row[2],
            }
            listing.print_table(rows, columns)
        else:
            print("no difference")
        return int(bool(rows))

    return _run_command(print_differences)


def checkpoints(arguments: list[str]) -> int:
    """List, show, compare or average the checkpoints of a run.

    Args:
        arguments: the command line after the name of the command.
    """
    if arguments and arguments[0] in _SUBCOMMANDS:
        return _SUBCOMMANDS[arguments[0]](arguments[1:])
    parser = argparse.ArgumentParser(
        "fulgurite checkpoints",
        description="Lists the checkpoints of a run: fulgurite checkpoints RUN",
        epilog=_SUBCOMMAND_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="the run's directory")
    parser.add_argument(
        "--full", action="store_true", help="look for damage in every byte, not in sizes alone"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)

    def print_checkpoints() -> int:
        rows = listing.list_checkpoints(options.run, "full" if options.full else "size")
        if options.json:
            listing.print_json(rows)
        else:
            listing.print_table(rows, listing.CHECKPOINT_COLUMNS)
        return 0

    return _run_command(print_checkpoints)


def _show(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "fulgurite checkpoints show", description="Shows what a checkpoint holds."
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="RUN/checkpoints/step-N, or RUN for its newest"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)

    def show() -> int:
        checkpoint = inspecting.open_checkpoint(options.checkpoint)
        if options.json:
            print(as_printable(dumps(inspecting.describe_checkpoint(checkpoint))))
        else:
            print(inspecting.format_checkpoint(checkpoint))
        return 0

    return _run_command(show)


def _diff(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "fulgurite checkpoints diff",
        description="Shows how two checkpoints differ; the exit code is 1 if they do.",
    )
    parser.add_argument("checkpoints", metavar="CHECKPOINT", nargs=2)
    options = parser.parse_args(arguments)

    def diff() -> int:
        first, second = map(inspecting.open_checkpoint, options.checkpoints)
        rows = inspecting.compare_checkpoints(first, second)
        print("\n".join(rows) or "no difference")
        return int(bool(rows))

    return _run_command(diff)


def _average(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "fulgurite checkpoints average",
        description=(
            "Writes a checkpoint of the mean weights of the newest N, for fit(init_from=PATH) and "
            "fulgurite evaluate --run PATH."
        ),
    )
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--last", metavar="N", type=int, required=True, help="how many")
    parser.add_argument(
        "--out",
        metavar="PATH",
        type=Path,
        required=True,
        help="a directory that does not exist yet",
    )
    options = parser.parse_args(arguments)

    def average() -> int:
        steps = averaging.average_checkpoints(options.run, options.last, options.out)
        print(f"{options.out}: the mean of the steps {', '.join(map(str, steps))}")
        return 0

    return _run_command(average)


def _run_command(command: Callable[[], int]) -> int:
    """Return the exit code of a command; print its error."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # What read the output, such as `head`, has ended. Python would report it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (FulguriteError, OSError) as error:
        print(as_printable(f"error: {error}"), file=sys.stderr)
        return 2


_SUBCOMMANDS = {"show": _show, "diff": _diff, "average": _average}
_SUBCOMMAND_HELP = """\
more:
  fulgurite checkpoints show CHECKPOINT             its arrays and what the run is made of
  fulgurite checkpoints diff A B                    how two checkpoints differ
  fulgurite checkpoints average RUN --last N --out PATH
                                                    a checkpoint of the mean weights of N others

a CHECKPOINT is RUN/checkpoints/step-N, or RUN for its newest
"""
