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
from fulgurite.errors import ConfigurationError, PluginError, ProcessError, did_you_mean
from fulgurite.redact import MASK
from fulgurite.tracebacks import hide_internal_frames
from fulgurite_config import Node
from fulgurite_runs.json_codec import dumps

from fulgurite_cli.configuration import build_from_config
from fulgurite_cli.processes import connect_processes
from fulgurite_cli.values import (
    Parameter,
    format_type,
    from_plain,
    get_parameters,
    parse_value,
    to_plain,
)

EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}
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
    parser = _build_parser(experiment, program)
    options = parser.parse_intermixed_args(argv)
    try:
        connect_processes()
        built = build_experiment(experiment, options.overrides, run_dir=options.run)
        if options.run is not None:
            built.engine.run_dir = options.run
    except (ConfigurationError, PluginError, ProcessError) as error:
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
    with _exit_on_second_interrupt():
        result = engine.fit(built.model, data, resume="auto" if can_resume else None)
    exit_codes = EXIT_CODES | {"SIGTERM": options.preempted_exit_code}
    if result.stop_reason in exit_codes:
        with suppress(OSError):  # what read it, such as `tee`, was ended by the same Ctrl-C
            print(
                f"stopped by {result.stop_reason} at step {int(result.state.step)}", file=sys.stderr
            )
        sys.exit(exit_codes[result.stop_reason])
    return result


def _build_parser(experiment: Factory, program: str | None) -> argparse.ArgumentParser:
    rows = [
        f"  {name}={'...' if parameter.is_required else to_plain(parameter.default)}"
        f"  ({format_type(parameter.type)})"
        for name, parameter in get_parameters(experiment).items()
    ]
    parser = argparse.ArgumentParser(
        prog=program,
        description=inspect.getdoc(experiment),
        epilog="\n".join(["arguments:", *rows]) if rows else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="name=value",
        help="arguments of the experiment, listed below",
    )
    parser.add_argument("--run", metavar="DIR", help="the run directory, where plugins write")
    parser.add_argument(
        "--preempted-exit-code",
        type=_parse_exit_code,
        default=EXIT_CODES["SIGTERM"],
        metavar="N",
        help="the exit code after SIGTERM, for schedulers that restart a job by its exit code "
        "(default: %(default)s)",
    )
    return parser


def build_experiment(
    experiment: Factory,
    overrides: Sequence[str] = (),
    saved_config: dict[str, Any] | None = None,
    *,
    run_dir: str | None = None,
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

    Raises:
        ConfigurationError: an argument is unknown, missing, or not of its type, or the function
            returns no `Experiment`.
    """
    parameters = get_parameters(experiment)
    built: Any = None if parameters else experiment()
    if isinstance(built, Node):
        resolved, engine_config = build_from_config(built, overrides, saved_config)
        built = _as_experiment(resolved)
        built.engine.program_file = inspect.getsourcefile(experiment)
        built.engine.config = engine_config
        return built
    arguments = _parse_overrides(experiment, overrides, parameters)
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
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.is_required and name not in arguments
    ]
    if missing:
        raise ConfigurationError(
            f"{experiment.__name__} needs {', '.join(f'{name}=...' for name in missing)}"
        )
    built = experiment(**arguments) if parameters else built
    if not isinstance(built, Experiment):
        raise ConfigurationError(
            f"{experiment.__name__} returned {type(built).__name__}; return "
            "fulgurite_cli.Experiment(...)"
        )
    if unknown and built.data is not None:
        name, value = min(unknown.items())
        raise ConfigurationError(
            f"the run was started with {name}={value!r}, and {experiment.__name__} has no "
            f"argument {name!r}: evaluate it with the program that trained it"
        )
    config = {name: parameter.default for name, parameter in parameters.items()} | arguments
    config.pop(RUN_DIR, None)
    built.engine.program_file = inspect.getsourcefile(experiment)
    built.engine.config = {name: to_plain(value) for name, value in config.items()}
    if run_dir is not None or built.engine.run_dir is not None:
        _check_config(experiment, built.engine.config)
    return built


def _as_experiment(resolved: Any) -> Experiment:
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


def _parse_exit_code(text: str) -> int:
    code = parse_value("--preempted-exit-code", text, int)
    if not 0 < code < 256:
        raise argparse.ArgumentTypeError(f"{code} is not an exit code: they go from 1 to 255")
    return code
