"""A program that trains: an experiment with typed arguments, run from the command line."""

import argparse
import inspect
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fulgurite import Engine, FitResult
from fulgurite.errors import (
    CheckpointError,
    ConfigurationError,
    PluginError,
    ProcessError,
    did_you_mean,
)
from fulgurite.redact import MASK
from fulgurite.tracebacks import hide_internal_frames
from fulgurite_config import ConfigError, Node
from fulgurite_runs.json_codec import dumps
from fulgurite_runs.redact import RedactedText

from fulgurite_cli.configuration import (
    KEY as CONFIG_KEY,
    build_from_config,
    find_packages,
    override_config,
    rebuild_from_config,
)
from fulgurite_cli.options import TERMINATED, FitParser, add_fit_options, print_to_pipe
from fulgurite_cli.processes import connect_processes
from fulgurite_cli.report import format_arguments, format_config, list_arguments
from fulgurite_cli.start_config import read_start_config
from fulgurite_cli.sweeping import plan_sweep, run_sweep
from fulgurite_cli.values import (
    Parameter,
    from_plain,
    get_parameters,
    parse_value,
    to_plain,
)

EXIT_CODES = {"SIGINT": 130, "SIGTERM": TERMINATED}
RUN_DIR = "run_dir"
"""An experiment's argument that gets the value of `--run`. It is no part of the configuration."""


@dataclass(frozen=True)
class Experiment:
    """What a program trains.

    Example:
        from fulgurite_cli import Experiment, run


        def experiment(seed: int = 0, steps: int = 1000) -> Experiment:
            engine = fg.Engine(steps=steps, seed=seed)
            return Experiment(engine, model=lambda key: Net(key), data=data)


        if __name__ == "__main__":
            run(experiment)

    Attributes:
        engine: the engine that trains.
        model: the model, as for `Engine.fit`.
        data: the data, as for `Engine.fit`, or a function without arguments that returns it and
            that is called only where the data is needed. None if the program only evaluates the
            checkpoints of other programs' runs.
    """

    engine: Engine
    model: Any
    data: Any = None


Factory = Callable[..., Any]
"""A function whose typed arguments are the configuration of the experiment that it returns, or one
without arguments that returns a configuration of `fulgurite_config`."""


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


def build_experiment(
    experiment: Factory,
    overrides: Sequence[str] = (),
    saved_config: dict[str, Any] | None = None,
    *,
    run_dir: str | None = None,
    start_config: dict[str, Any] | None = None,
    allow: Sequence[str] = (),
) -> Experiment:
    """Call an experiment's function with `name=value` overrides.

    Args:
        experiment: the function.
        overrides: texts `name=value`.
        saved_config: the configuration in a run's manifest. It holds: an override that differs is
            an error, unless the manifest hides the value because it is a secret. An argument that
            the function does not have is one too, unless its program only evaluates.
        run_dir: the run directory, handed to an experiment that has an argument `run_dir`, so that
            it can leave out plugins that need one.
        start_config: a configuration, as manifests hold it, that overrides may change.
        allow: packages that a saved configuration may import, besides those of the program's own.

    Raises:
        ConfigurationError: an argument is unknown, missing, or not of its type, or the function
            returns no `Experiment`.
    """
    parameters = get_parameters(experiment)
    built: Any = None if parameters else experiment()
    if isinstance(built, Node):
        if saved_config is None:
            resolved, engine_config = build_from_config(built, overrides, start_config)
        else:
            resolved = rebuild_from_config(saved_config, overrides, built, allow)
            engine_config = saved_config | {CONFIG_KEY: RedactedText(saved_config[CONFIG_KEY])}
        return _finish_experiment(as_experiment(resolved), experiment, engine_config)
    if allow:
        raise ConfigurationError(
            "--allow is for a run whose program is a configuration: leave it out"
        )
    arguments = _read_start_config(experiment, start_config or {}, parameters)
    arguments |= _parse_overrides(experiment, overrides, parameters)
    if RUN_DIR in parameters and run_dir is not None:
        arguments.setdefault(RUN_DIR, run_dir)
    unknown: dict[str, Any] = {}
    if saved_config is not None:
        unknown = {
            name: value
            for name, value in saved_config.items()
            if name not in parameters and not _is_hidden(value)
        }
        arguments |= _merge_saved_config(experiment, saved_config, arguments)
    _check_complete(experiment, parameters, arguments)
    built = experiment(**arguments) if parameters else built
    _check_experiment(experiment, built)
    if unknown and built.data is not None:
        name, value = min(unknown.items())
        raise ConfigurationError(
            f"the run was started with {name}={value!r}, and {experiment.__name__} has no "
            f"argument {name!r}: evaluate it with the program that trained it"
        )
    config = {name: parameter.default for name, parameter in parameters.items()} | arguments
    config.pop(RUN_DIR, None)
    config = {name: to_plain(value) for name, value in config.items()}
    if run_dir is not None or built.engine.run_dir is not None:
        _check_config(experiment, config)
    return _finish_experiment(built, experiment, config)


def _check_complete(
    experiment: Factory, parameters: dict[str, Parameter], arguments: dict[str, Any]
) -> None:
    """Raise a `ConfigurationError` if an argument without a default is missing."""
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.is_required and name not in arguments
    ]
    if missing:
        raise ConfigurationError(
            f"{experiment.__name__} needs {', '.join(f'{name}=...' for name in missing)}"
        )


def _check_experiment(experiment: Factory, built: Any) -> None:
    """Raise a `ConfigurationError` if a function returned no `Experiment`."""
    if isinstance(built, Node):
        raise ConfigurationError(
            f"{experiment.__name__} has arguments and returned a configuration: one that returns a "
            "configuration has no arguments, because the command line sets its values by path"
        )
    if not isinstance(built, Experiment):
        raise ConfigurationError(
            f"{experiment.__name__} returned {type(built).__name__}; return "
            "fulgurite_cli.Experiment(...)"
        )


def _finish_experiment(
    built: Experiment, experiment: Factory, engine_config: dict[str, Any]
) -> Experiment:
    """Tell the engine of an experiment which program made it, and of what.

    Args:
        built: the experiment.
        experiment: the function of the program.
        engine_config: its configuration, as manifests hold it.
    """
    built.engine.program_file = inspect.getsourcefile(experiment)
    built.engine.config = engine_config
    return built


def as_experiment(resolved: Any) -> Experiment:
    """Return the experiment of a resolved configuration: an `Experiment`, or a section with
    `engine`, `model` and perhaps `data`."""
    if isinstance(resolved, Experiment):
        return resolved
    if not hasattr(resolved, "engine") or not hasattr(resolved, "model"):
        raise ConfigurationError(
            "the configuration has no `engine` or no `model`: set cfg.engine = L(fg.Engine, ...) "
            "and cfg.model = L(...), or return L(Experiment, ...)"
        )
    return Experiment(resolved.engine, resolved.model, getattr(resolved, "data", None))


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


def describe_values(
    experiment: Factory,
    overrides: Sequence[str],
    start_config: dict[str, Any] | None,
    start_source: str,
) -> str:
    """Return a line for each value that an experiment would get, and where it comes from.

    Args:
        experiment: the function.
        overrides: texts `name=value`.
        start_config: a configuration, as manifests hold it, that the overrides change.
        start_source: what to call it.

    Raises:
        ConfigurationError: as `build_experiment`; a missing argument is shown as `...`.
    """
    parameters = get_parameters(experiment)
    config = None if parameters else experiment()
    if isinstance(config, Node):
        try:
            allow = find_packages(config)
            changed = override_config(config, overrides, start_config)
            return format_config(changed, start_source, allow)
        except ConfigError as error:
            raise ConfigurationError(str(error)) from error
    changed = _parse_overrides(experiment, overrides, parameters)
    started = _read_start_config(experiment, start_config or {}, parameters)
    rows: list[tuple[str, Any, str]] = []
    for name, parameter in parameters.items():
        if name in changed:
            rows.append((name, changed[name], "command line"))
        elif name in started:
            rows.append((name, started[name], start_source))
        else:
            default = "..." if parameter.is_required else parameter.default
            rows.append((name, default, "missing" if parameter.is_required else "default"))
    return format_arguments(rows)


def _read_start_config(
    experiment: Factory, start_config: dict[str, Any], parameters: dict[str, Parameter]
) -> dict[str, Any]:
    """Return the arguments in a configuration, apart from hidden secrets."""
    arguments: dict[str, Any] = {}
    for name, value in start_config.items():
        if name not in parameters:
            raise ConfigurationError(
                f"{experiment.__name__} has no argument {name!r}, which the configuration sets. "
                f"{did_you_mean(name, parameters)}"
            )
        if not _is_hidden(value):
            arguments[name] = from_plain(name, value, parameters[name].type)
    return arguments


def _parse_overrides(
    experiment: Factory, overrides: Sequence[str], parameters: dict[str, Parameter]
) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ConfigurationError(f"{override!r} is not an argument: write name=value")
        if name not in parameters:
            raise ConfigurationError(
                f"{experiment.__name__} has no argument {name!r}. {did_you_mean(name, parameters)}"
            )
        arguments[name] = parse_value(name, text, parameters[name].type)
    return arguments


def _check_config(experiment: Factory, config: dict[str, Any]) -> None:
    """Raise a `ConfigurationError` if the manifest cannot hold the configuration."""
    for name, value in config.items():
        try:
            dumps(value)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{experiment.__name__}({name}=...) cannot be written to the run's manifest: "
                f"{error}"
            ) from error


def _merge_saved_config(
    experiment: Factory, saved_config: dict[str, Any], arguments: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments that a run was started with, apart from hidden secrets and from those
    that the experiment does not have."""
    parameters = get_parameters(experiment)
    merged: dict[str, Any] = {}
    for name, value in saved_config.items():
        if name not in parameters or _is_hidden(value):
            continue
        if name in arguments and json.loads(json.dumps(to_plain(arguments[name]))) != value:
            raise ConfigurationError(
                f"{name}={arguments[name]!r} differs from what the run was started with, "
                f"{name}={value!r}: leave it out"
            )
        merged[name] = from_plain(name, value, parameters[name].type)
    return merged


def _is_hidden(value: Any) -> bool:
    """Return whether a manifest hides a value because it is a secret."""
    return MASK in json.dumps(value)


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
