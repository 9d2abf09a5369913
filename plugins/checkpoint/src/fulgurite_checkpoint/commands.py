"""The commands `fulgurite runs` and `fulgurite checkpoints`. They read alone, but for what `average
--out` makes."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from fulgurite.errors import FulguriteError
from fulgurite_runs.json_codec import dumps

from fulgurite_checkpoint import averaging, inspecting, listing


def runs(arguments: list[str]) -> int:
    """`fulgurite runs DIR`: the runs in a directory and how they are."""
    parser = argparse.ArgumentParser(
        "fulgurite runs", description="Lists the runs in DIR, or DIR if it is one."
    )
    parser.add_argument("directory", metavar="DIR", nargs="?", default=".", type=Path)
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    return _done(
        lambda: listing.print_table(
            listing.list_runs(options.directory), listing.RUN_COLUMNS, options.json
        )
    )


def checkpoints(arguments: list[str]) -> int:
    """`fulgurite checkpoints RUN`, and `show`, `diff` and `average`."""
    verb = arguments[0] if arguments and arguments[0] in _VERBS else None
    if verb is not None:
        return _VERBS[verb](arguments[1:])
    parser = argparse.ArgumentParser(
        "fulgurite checkpoints",
        description="Lists the checkpoints of a run: fulgurite checkpoints RUN",
        epilog="\n".join(
            [
                "more:",
                "  fulgurite checkpoints show CHECKPOINT             its arrays and what the run "
                "is made of",
                "  fulgurite checkpoints diff A B                    how two checkpoints differ",
                "  fulgurite checkpoints average RUN --last N --out PATH",
                "                                                    a checkpoint of the mean "
                "weights of N others",
                "",
                "a CHECKPOINT is RUN/checkpoints/step-N, or RUN for its newest",
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="the run's directory")
    parser.add_argument(
        "--full", action="store_true", help="look for damage in every byte, not in sizes alone"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    return _done(
        lambda: listing.print_table(
            listing.list_checkpoints(options.run, "full" if options.full else "size"),
            listing.CHECKPOINT_COLUMNS,
            options.json,
        )
    )


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
        kept = inspecting.open_checkpoint(options.checkpoint)
        print(
            dumps(inspecting.describe_checkpoint(kept))
            if options.json
            else inspecting.format_checkpoint(kept)
        )
        return 0

    return _done(show)


def _diff(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "fulgurite checkpoints diff",
        description="Shows how two checkpoints differ; the exit code is 1 if they do.",
    )
    parser.add_argument("checkpoints", metavar="CHECKPOINT", nargs=2)
    options = parser.parse_args(arguments)

    def diff() -> int:
        rows = inspecting.compare_checkpoints(*map(inspecting.open_checkpoint, options.checkpoints))
        print("\n".join(rows) or "no difference")
        return int(bool(rows))

    return _done(diff)


def _average(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "fulgurite checkpoints average",
        description=(
            "Makes a checkpoint of the mean weights of the newest N, for fit(init_from=PATH)."
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

    return _done(average)


def _done(command: Callable[[], int]) -> int:
    try:
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read it has seen enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (FulguriteError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


_VERBS = {"show": _show, "diff": _diff, "average": _average}
