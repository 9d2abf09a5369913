"""Running a program from the command line."""

import argparse
import inspect
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from fulgurite import FitResult
from fulgurite.errors import CheckpointError, ConfigurationError, PluginError, ProcessError
from fulgurite.tracebacks import hide_internal_frames

from fulgurite_cli.experiment import Factory, build_experiment, describe_values
from fulgurite_cli.options import TERMINATED, FitParser, add_fit_options, print_to_pipe
from fulgurite_cli.processes import connect_processes
from fulgurite_cli.report import list_arguments
from fulgurite_cli.start_config import read_start_config
from fulgurite_cli.sweeping import plan_sweep, run_sweep

EXIT_CODES = {"SIGINT": 130, "SIGTERM": TERMINATED}


@hide_internal_frames
def run(
    experiment: Factory, argv: Sequence[str] | None = None, program: str | None = None
) -> FitResult:
    """Train an experiment as the command line says: `python digits.py lr=3e-4 --run runs/a`.

    After a first signal the step is finished and saved; a second one ends the process at once.

    Args:
        experiment: the function whose arguments `name=value` sets.
        argv: the command line, without the program; that of this process by default.
        program: the program's name in help and errors.

    Returns:
        The result of the fit.

    Raises:
        SystemExit: with 130 after Ctrl-C, with 143 (or `--preempted-exit-code`) after SIGTERM,
            and with 2 on invalid arguments.
    """
    parser = _build_parser(experiment, program, sys.argv[1:] if argv is None else argv)
    options = parser.parse_intermixed_args(argv)
    try:
        start_config, start_source = read_start_config(options)
        if options.should_print or options.sweep:
            descriptions = describe_runs(experiment, options, start_config, start_source)
            if options.should_print:
                print_to_pipe("\n\n".join(descriptions))
                sys.exit(0)
            sys.exit(run_sweep(inspect.getfile(experiment), options))
        connect_processes()
        built = build_experiment(
            experiment, options.overrides, run_dir=options.run, start_config=start_config
        )
        if options.run is not None:
            built.engine.run_dir = options.run
    except (CheckpointError, ConfigurationError, PluginError, ProcessError) as error:
        parser.exit(2, f"error: {error}\n")
    if built.data is None:
        parser.exit(
            2,
            "error: this program has no data to train on: give Experiment(..., data=...), or "
            "evaluate a checkpoint with it: fulgurite evaluate PROGRAM --run DIR\n",
        )
    engine = built.engine
    data = built.data() if callable(built.data) else built.data
    can_resume = (
        engine.run_dir is not None
        and engine.plugins.get_single_impl("restore_checkpoint") is not None
    )
    resume = "never" if options.resume == "never" else "auto"
    with _exit_on_second_interrupt(), _note_options():
        result = engine.fit(
            built.model,
            data,
            resume=resume if can_resume else None,
            init_from=options.init_from,
        )
    exit_codes = EXIT_CODES | {"SIGTERM": options.preempted_exit_code}
    if result.stop_reason in exit_codes:
        with suppress(OSError):  # what read it, such as `tee`, was ended by the same Ctrl-C
            print(
                f"stopped by {result.stop_reason} at step {int(result.state.step)}", file=sys.stderr
            )
        sys.exit(exit_codes[result.stop_reason])
    return result


def _build_parser(
    experiment: Factory, program: str | None, argv: Sequence[str]
) -> argparse.ArgumentParser:
    # A configuration is made to list what is in it, so only where someone asks.
    has_help = "-h" in argv or "--help" in argv
    rows = list_arguments(experiment) if has_help else []
    parser = FitParser(
        prog=program,
        description=inspect.getdoc(experiment),
        epilog="\n".join(["arguments:", *rows]) if rows else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_fit_options(parser)
    return parser


def describe_runs(
    experiment: Factory,
    options: argparse.Namespace,
    start_config: dict[str, Any] | None,
    start_source: str,
) -> list[str]:
    """Return what `--print` shows: of a program, or of each run of a sweep.

    Args:
        experiment: the function.
        options: of the command line.
        start_config: a configuration, as manifests hold it, that the overrides change.
        start_source: what to call it.

    Raises:
        ConfigurationError: the overrides of one of them do not fit.
    """
    if not options.sweep:
        return [describe_values(experiment, options.overrides, start_config, start_source)]
    return [
        f"# {name}\n{describe_values(experiment, overrides, start_config, start_source)}"
        for name, overrides in plan_sweep(options.overrides, options.sweep).items()
    ]


@contextmanager
def _note_options() -> Iterator[None]:
    """Add to errors that name arguments of `fit` what they are called on the command line."""
    try:
        yield
    except (CheckpointError, ConfigurationError) as error:
        if "resume=" in str(error) or "init_from=" in str(error):
            error.add_note("on the command line: --resume never, --init-from RUN")
        raise


@contextmanager
def _exit_on_second_interrupt() -> Iterator[None]:
    """Let a second Ctrl-C within the block end the process, whatever it waits for."""

    def exit_at_once(*_: Any) -> None:
        # A display may have hidden the cursor; `print` may be blocked.
        show_cursor = b"\x1b[?25h" if os.isatty(2) else b""
        os.write(2, show_cursor + b"stopped at once by SIGINT\n")
        os._exit(EXIT_CODES["SIGINT"])

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, exit_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
