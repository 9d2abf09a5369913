"""The command `fulgurite profile`."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fulgurite.errors import ConfigurationError, FulguriteError
from fulgurite.plugins import as_printable

from fulgurite_profiler.summary import Operation, ProfileSummary, find_trace, summarize_profile


def main(arguments: list[str]) -> int:
    """Show which operations took the time in a profile of a run.

    Args:
        arguments: the command line after the name of the command.
    """
    parser = argparse.ArgumentParser(
        "fulgurite profile",
        description="Shows which operations and layers took the time in a profile of RUN, the "
        "newest if it has several.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="of a run, or of a trace")
    parser.add_argument("--window", metavar="steps-A-B", help="another profile than the newest")
    parser.add_argument(
        "--top", metavar="N", type=int, default=10, help="rows of each table (default 10)"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="as JSON, with all operations")
    output.add_argument(
        "--open", action="store_true", help="show it in a browser, by xprof, until Ctrl-C"
    )
    options = parser.parse_args(arguments)
    try:
        trace = find_trace(options.run, options.window)
        if options.open:
            return _open(trace)
        summary = summarize_profile(trace)
    except FulguriteError as error:
        print(f"error: {as_printable(str(error))}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(asdict(summary), indent=2))
    else:
        print(f"{as_printable(os.fspath(trace))}\n")
        print("\n".join(format_summary(summary, options.top)))
    return 0


def format_summary(summary: ProfileSummary, top: int) -> list[str]:
    """Return the lines that show a summary.

    Args:
        summary: what is shown.
        top: how many rows each table has.
    """
    lines = []
    if summary.steps:
        numbers = list(summary.steps)
        mean = sum(summary.steps.values()) / len(numbers)
        lines.append(f"steps {numbers[0]} to {numbers[-1]}, {mean * 1e3:,.3f} ms each")
    if not summary.operations:
        return [*lines, "the trace has no operations of a device"]
    lines.append(f"{summary.seconds * 1e3:,.3f} ms of operations on {', '.join(summary.devices)}")
    lines += ["", "by time", *_format_table(summary, summary.operations[:top])]
    by_flops = sorted(summary.operations, key=lambda operation: -operation.flops)
    by_flops = [operation for operation in by_flops if operation.flops > 0][:top]
    if by_flops:
        lines += ["", "by FLOPs", *_format_table(summary, by_flops)]
    layers = summary.add_up_layers()
    if len(layers) > 1:
        lines += ["", "by layer", *_format_table(summary, layers[:top])]
    return [as_printable(line) for line in lines]


def _format_table(summary: ProfileSummary, operations: Sequence[Operation]) -> list[str]:
    lines = [f"{'ms':>10} {'share':>6} {'calls':>7} {'GFLOP':>9} {'GFLOP/s':>9}  operation"]
    for operation in operations:
        flops = rate = ""
        if operation.flops > 0:
            flops = f"{operation.flops / 1e9:,.4f}"
            rate = f"{operation.flops / 1e9 / operation.seconds:,.1f}" if operation.seconds else ""
        share = operation.seconds / summary.seconds if summary.seconds else 0.0
        label = "  ".join(part for part in (operation.name, operation.layer) if part)
        lines.append(
            f"{operation.seconds * 1e3:10,.3f} {share:6.1%} {operation.calls:7,} {flops:>9} "
            f"{rate:>9}  {label}"
        )
    return lines


def _open(trace: Path) -> int:
    """Show a trace by xprof, whose server prints its address."""
    if importlib.util.find_spec("xprof") is None:
        raise ConfigurationError(
            "--open needs xprof: install fulgurite-profiler[xprof], or open the trace at "
            "https://ui.perfetto.dev"
        )
    return subprocess.run([sys.executable, "-m", "xprof.server", "--logdir", trace]).returncode
