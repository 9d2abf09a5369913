"""Running a program from the command line."""

import argparse
import gc
import inspect
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import jax
from fulgurite import CheckpointRef, Engine, FitResult
from fulgurite.errors import (
    CheckpointError,
    ConfigurationError,
    FulguriteError,
    PluginError,
    ProcessError,
)
from fulgurite.plugins import (
    TRACEBACK_VARIABLE,
    as_printable,
    has_user_frames,
    hide_internal_frames,
    redact_value,
)
from fulgurite_runs import InUseError, RunDirectory, dumps, get_arguments, loads

from fulgurite_cli.activity import show_activity
from fulgurite_cli.compilation_cache import use_compilation_cache
from fulgurite_cli.experiment import (
    Experiment,
    Factory,
    build_experiment,
    describe_values,
    plan_config,
)
from fulgurite_cli.mistakes import format_mistake
from fulgurite_cli.options import IN_USE, TERMINATED, FitParser, add_fit_options, print_to_pipe
from fulgurite_cli.processes import connect_processes
from fulgurite_cli.report import list_arguments
from fulgurite_cli.start_config import read_start_config
from fulgurite_cli.sweeping import plan_sweep, run_sweep
from fulgurite_cli.swept import stop_with_sweep
from fulgurite_cli.values import is_same_value

MISTAKES = (CheckpointError, ConfigurationError, PluginError, ProcessError)
"""What is wrong with the command line, the program or the run directory."""
# A data source has an argument `resume`, too.
_NAMES_OPTION = re.compile(r"\bresume=(?!'(?:exact|replay|restart)')|\binit_from=")
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
    stop_with_sweep()
    parser = _build_parser(experiment, program, sys.argv[1:] if argv is None else argv)
    options = parser.parse_intermixed_args(argv)
    if options.jobs > 1 and not options.sweep:
        parser.error("--jobs is for the runs of a --sweep")
    if options.should_print or options.sweep:
        return _train(experiment, parser, options)
    with use_compilation_cache(options.compilation_cache), _set_imports_aside():
        return _train(experiment, parser, options)


@contextmanager
def _set_imports_aside() -> Iterator[None]:
    """Leave what is imported out of the search for garbage until the program ends.

    Python looks through all objects once a quarter of them is new. Those of the libraries are
    135,000; tracing a first step made it look once, for 0.08 of the 0.6 s of a start with a warm
    compilation cache.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _train(
    experiment: Factory, parser: argparse.ArgumentParser, options: argparse.Namespace
) -> FitResult:
    """Build an experiment and train it; end the program as `run` says."""
    try:
        built = _build_or_exit(experiment, options)
    except MISTAKES as error:
        parser.exit(2, format_mistake(error))
    if built.data is None:
        parser.exit(
            2,
            "error: this program has no data to train on: give Experiment(..., data=...), or "
            "evaluate a checkpoint with it: fulgurite evaluate PROGRAM --run DIR\n",
        )
    with show_activity("loading the data"):
        data = built.data() if callable(built.data) else built.data
    with show_activity("starting the devices"):  # seconds with a GPU
        jax.process_count()
    try:
        result = _fit(built, data, options)
    except MISTAKES as error:
        if _needs_traceback(error):
            raise
        code = IN_USE if isinstance(error, InUseError) else 1
        parser.exit(code, format_mistake(error))
    exit_codes = EXIT_CODES | {"SIGTERM": options.preempted_exit_code}
    if result.stop_reason in exit_codes:
        with suppress(OSError):  # what read it, such as `tee`, was ended by the same Ctrl-C
            print(
                f"stopped by {result.stop_reason} at step {int(result.state.step)}", file=sys.stderr
            )
        sys.exit(exit_codes[result.stop_reason])
    return result


def _build_or_exit(experiment: Factory, options: argparse.Namespace) -> Experiment:
    """Return what is to be trained; end the program after `--print` and `--sweep`."""
    start_config, start_source = read_start_config(options)
    if options.should_print:
        descriptions = describe_runs(experiment, options, start_config, start_source)
        print_to_pipe(as_printable("\n\n".join(descriptions)))
        sys.exit(0)
    if options.sweep:
        sys.exit(
            run_sweep(
                experiment,
                options,
                lambda overrides: plan_config(experiment, overrides, start_config, options.allow),
            )
        )
    connect_processes()
    with show_activity("building the experiment"):
        built = build_experiment(
            experiment,
            options.overrides,
            run_dir=options.run,
            start_config=start_config,
            allow=options.allow,
        )
    if options.run is not None:
        built.engine.run_dir = options.run
    return built


def _fit(built: Experiment, data: Any, options: argparse.Namespace) -> FitResult:
    """Train an experiment, and resume the run in its directory if a plugin can."""
    engine = built.engine
    can_resume = (
        engine.run_dir is not None
        and engine.plugins.hooks.restore_checkpoint.get_owner() is not None
    )
    with _exit_on_second_interrupt(), shorten_warnings(), _note_options(engine):
        return engine.fit(
            built.model,
            data,
            resume=_choose_resume(options) if can_resume else None,
            init_from=options.init_from,
        )


def _choose_resume(options: argparse.Namespace) -> CheckpointRef | str:
    if options.resume == "auto" and options.hyperparameters == "program":
        return CheckpointRef(None, optional=True, hyperparameters="program")
    return options.resume


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
        return [
            describe_values(
                experiment, options.overrides, start_config, start_source, options.allow
            )
        ]
    texts = {
        name: describe_values(experiment, overrides, start_config, start_source, options.allow)
        for name, overrides in plan_sweep(options.overrides, options.sweep).items()
    }
    return [f"# {name}\n{text}" for name, text in texts.items()]


@contextmanager
def _note_options(engine: Engine) -> Iterator[None]:
    """Add to errors of a fit what a user of the command line can do: what the arguments of `fit`
    are called there, and which arguments differ from those of the run that does not fit."""
    try:
        yield
    except (CheckpointError, ConfigurationError) as error:
        if _NAMES_OPTION.search(str(error)):
            error.add_note("on the command line: --resume never, --init-from RUN")
        if isinstance(error, CheckpointError):
            for change in _iter_changes(engine):
                error.add_note(f"since the run was started, {change}")
        raise


@contextmanager
def shorten_warnings() -> Iterator[None]:
    """Show warnings of Fulgurite in one line: their place in it helps nobody."""
    former = warnings.formatwarning

    def format_warning(
        message: Any, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if re.search(r"[/\\]fulgurite(_\w+)?[/\\]", filename):
            return as_printable(f"warning: {message}\n")
        return former(message, category, filename, lineno, line)

    warnings.formatwarning = format_warning
    try:
        yield
    finally:
        warnings.formatwarning = former


def _iter_changes(engine: Engine) -> Iterator[str]:
    """Yield what differs between the arguments of a run and those of an engine that resumes it."""
    if engine.run_dir is None:
        return
    try:
        saved = get_arguments(RunDirectory(engine.run_dir).read_manifest())
    except CheckpointError:  # no run yet, or one whose fault the fit itself reports
        return
    current = get_arguments({"configuration": loads(dumps(redact_value(engine.config)))})
    for name in saved.keys() & current.keys():
        if not is_same_value(saved[name], current[name]):
            yield f"{name} was {saved[name]!r} and is {current[name]!r}"


def _needs_traceback(error: Exception) -> bool:
    """Return whether the place of an error is worth knowing: it is in the user's code, or it comes
    from an exception there, or all tracebacks are asked for."""
    is_final = error.__cause__ is None or isinstance(error.__cause__, FulguriteError | OSError)
    return os.environ.get(TRACEBACK_VARIABLE) == "full" or has_user_frames(error) or not is_final


@contextmanager
def _exit_on_second_interrupt() -> Iterator[None]:
    """Let a second Ctrl-C within the block end the process, whatever it waits for."""

    def exit_at_once(*_: Any) -> None:
        if signal.getsignal(signal.SIGINT) is not exit_at_once:
            return  # the first one, that a fit has taken for a request to stop
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
