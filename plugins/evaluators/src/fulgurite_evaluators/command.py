"""The command `fulgurite evaluate`: a run's checkpoint, or all of them as they come."""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence

from fulgurite.errors import CheckpointError, ConfigurationError, FulguriteError
from fulgurite.plugins import EvaluationResult, as_printable
from fulgurite_cli import Experiment, format_mistake, rebuild_experiment
from fulgurite_runs import RunDirectory, dumps

from fulgurite_evaluators.follow import Follower, format_result
from fulgurite_evaluators.once import evaluate_checkpoint

POLL = 0.2
"""Seconds between two looks whether the run has begun."""


def main(arguments: Sequence[str]) -> int:
    """Evaluate a checkpoint of a run, or its checkpoints while it is training.

    Returns:
        The exit code: 0; 1 if an evaluation failed or what it waited for did not come; 2 for
        invalid arguments; 130 after Ctrl-C.
    """
    parser = _build_parser()
    options = parser.parse_intermixed_args(arguments)
    if options.group is not None and options.output is not None:
        parser.error("--output is for a checkpoint; the results of a group are in the run")
    if options.group is not None and options.json:
        parser.error(
            "--json is for a checkpoint; fulgurite_evaluators.read_results reads those of a group"
        )
    run = RunDirectory(options.run)
    try:
        if options.group is not None:
            _wait_for_start(run, options.timeout)
        experiment = rebuild_experiment(
            options.run, *split_program(options.arguments), options.allow
        )
        if options.group is None:
            has_succeeded = _evaluate_once(experiment, run, options)
        else:
            has_succeeded = _follow(experiment, run, options.group, options.idle_timeout)
        return 0 if has_succeeded else 1
    except ConfigurationError as error:
        sys.stderr.write(format_mistake(error))
        return 2
    except FulguriteError as error:
        sys.stderr.write(format_mistake(error))
        return 1
    except KeyboardInterrupt:
        return 130


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "fulgurite evaluate",
        description=(
            "Evaluates a checkpoint of a run (--step), or its checkpoints while it is training"
            " (--group). The program's arguments are those of the run."
        ),
    )
    add_program_arguments(parser)
    parser.add_argument("--run", metavar="DIR", required=True, help="the run's directory")
    checkpoints = parser.add_mutually_exclusive_group()
    checkpoints.add_argument(
        "--step",
        default="latest",
        type=parse_step,
        help="latest (the default), best, or a number",
    )
    checkpoints.add_argument(
        "--group", help="follow the run with the standalone evaluators of this group"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds to wait for the run to begin (600)"
    )
    parser.add_argument(
        "--idle-timeout",
        type=float,
        default=120.0,
        help="seconds without a sign of life of the trainer (120)",
    )
    parser.add_argument("--json", action="store_true", help="results as JSON, one line each")
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="a directory of its own in which the program's loggers write the results",
    )
    return parser


def add_program_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the program of a run, which may be left out, and its arguments."""
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="[PROGRAM] name=value",
        help="the Python file that defines `experiment` (default: the file of that name in the "
        "current directory), and arguments that the run does not record",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="NAME",
        help="the run's configuration may name this function or class, module:name, or all of a "
        "package (repeat it for several); without PROGRAM, the run is built from its manifest "
        "alone",
    )


def split_program(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the program, or None if it was left out, and the overrides."""
    first = arguments[0] if arguments else ""
    # A program may be in a folder such as `runs/lr=1`.
    if first and ("=" not in first or (first.endswith(".py") and os.path.isfile(first))):
        return arguments[0], list(arguments[1:])
    return None, list(arguments)


def _wait_for_start(run: RunDirectory, timeout: float) -> None:
    """Wait until the run has begun; raise `CheckpointError` if it does not."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            run.read_manifest()
            return
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):
                raise  # it has begun, and may not be read
            if time.monotonic() >= deadline:
                raise CheckpointError(
                    f"no run began in {run.path} within {timeout:g} s. Check the path, start the"
                    " training with --run, or wait longer with --timeout"
                ) from error
        time.sleep(POLL)


def _follow(experiment: Experiment, run: RunDirectory, group: str, idle_timeout: float) -> bool:
    """Evaluate the checkpoints of a run as they come; return whether all evaluations succeeded."""
    follower = Follower(experiment, run, group, idle_timeout=idle_timeout, print_line=_print_line)
    try:
        return follower.follow()
    except OSError as error:
        raise CheckpointError(
            f"the results of group {group!r} cannot be kept in {run.path}: {error}. Those already "
            "in it are complete; start this again for the rest"
        ) from error


def _evaluate_once(experiment: Experiment, run: RunDirectory, options: argparse.Namespace) -> bool:
    """Run every evaluator of the program on one checkpoint; return whether all succeeded."""

    def report(name: str, step: int, result: EvaluationResult | Exception) -> None:
        if isinstance(result, Exception):
            text = "".join(traceback.format_exception(result))
            print(as_printable(f"{name}  step {step}  failed:\n{text}"), file=sys.stderr)
        elif options.json:
            _print_line(dumps({"evaluator": name, "step": step, "metrics": result.metrics}))
        else:
            _print_line(format_result(name, step, result.metrics))

    output = None if options.output is None else RunDirectory(options.output)
    return evaluate_checkpoint(experiment, run, options.step, output=output, report=report)


def parse_step(text: str) -> int | str:
    """Return a step from the command line: a number, `latest` or `best`."""
    if text in ("latest", "best"):
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor latest nor best")
    return int(text)


def _print_line(text: str) -> None:
    # Whoever follows the process sees each line at once.
    print(as_printable(text), flush=True)
