"""Sweeps: a run for each combination of values, in a process and a run directory of its own."""

import argparse
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite.plugins import REDACTED, is_secret_name, redact_shapes
from fulgurite_config import ConfigError, expand_axes, split_axis, split_override
from fulgurite_runs import RunDirectory, dumps, expand_path, get_arguments

from fulgurite_cli.swept import SweptRun

POLL = 0.05
"""Seconds between two looks whether a run has ended."""
EXIT_CODES: dict[int, int] = {signal.SIGINT: 130, signal.SIGHUP: 129}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def plan_sweep(overrides: Sequence[str], axes: Sequence[str]) -> dict[str, list[str]]:
    """Return the overrides of each run of a sweep by its name, those of the last axis next to each
    other.

    Args:
        overrides: what all runs have.
        axes: strings as `fulgurite_config.sweep` takes them: `lr=1e-3,1e-2`.

    Raises:
        ConfigurationError: an axis is none or holds a secret, something is set twice, or two runs
            would be the same.
    """
    for axis in axes:
        if redact_shapes(axis) != axis:
            raise _make_secret_error(axis.partition("=")[0])
    try:
        runs = expand_axes(axes)
        paths = {split_override(override)[0] for override in overrides}
    except ConfigError as error:
        raise ConfigurationError(str(error)) from error
    for change in next(iter(runs.values())):
        path, _ = split_override(change)
        if path in paths:
            raise ConfigurationError(f"{path} is set twice, and one of these by --sweep")
    return {name: [*overrides, *changes] for name, changes in runs.items()}


def run_sweep(
    experiment: Callable[..., Any],
    options: argparse.Namespace,
    plan_config: Callable[[list[str]], dict[str, Any]],
) -> int:
    """Run all runs of a sweep that are not complete yet, or not with this configuration, or all of
    them with `--resume never`; return the exit code.

    A signal is handed to the runs, which save and end; the same command continues with the rest. If
    this process is killed, they save and end as well.

    Args:
        experiment: the function of the program.
        options: of its command line.
        plan_config: returns the configuration of a run with such overrides, as its manifest will
            hold it, or raises an error of the overrides.

    Returns:
        0; 1 if a run failed; after a signal 130, 129 (the terminal was closed) or the code for
        SIGTERM.

    Raises:
        ConfigurationError: there is no `--run`, it is a run itself, or an axis is none or
            changes a secret.
    """
    if options.run is None:
        raise ConfigurationError(
            "a sweep needs a directory in which each run gets one of its own: give --run DIR"
        )
    runs = plan_sweep(options.overrides, options.sweep)
    configs = {name: _plan(name, overrides, plan_config) for name, overrides in runs.items()}
    for config in configs.values():
        check_no_secret(options.sweep, config)
    folder = Path(expand_path(options.run))
    if RunDirectory(folder).num_attempts:
        raise ConfigurationError(f"{folder} is a run: give a sweep a directory of its own")
    commands = {
        name: _build_command(experiment, overrides, folder / name, options)
        for name, overrides in runs.items()
        if options.resume == "never" or not _is_done(RunDirectory(folder / name), configs[name])
    }
    print(f"{len(commands)} of {len(runs)} runs to do in {folder}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    failed, received = _run_commands(commands, folder, options.jobs)
    if not received:
        print(f"the runs are over; fulgurite runs {folder} compares them", flush=True)
    for name, code in failed.items():
        print(f"{name} failed with code {code}", file=sys.stderr)
    if received:
        return (EXIT_CODES | {signal.SIGTERM: options.preempted_exit_code})[received[0]]
    return 1 if failed else 0


def _plan(
    name: str, overrides: list[str], plan_config: Callable[[list[str]], dict[str, Any]]
) -> dict[str, Any]:
    """Return the configuration of a run of a sweep.

    Args:
        name: of the run, which an error of its overrides names.
        overrides: strings `name=value`.
        plan_config: returns the configuration.
    """
    try:
        return plan_config(overrides)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from error


def check_no_secret(axes: Sequence[str], config: dict[str, Any]) -> None:
    """Raise a `ConfigurationError` if an axis changes a secret, whose values would be the names of
    folders, or stand in the journal of a sweep.

    Args:
        axes: of the sweep.
        config: of one of its runs, in which secrets are masked.
    """
    arguments = get_arguments({"configuration": config})
    paths = [path for axis in axes for path in split_axis(axis)[0]]
    for axis in axes:
        if redact_shapes(axis) != axis:
            raise _make_secret_error(axis.partition("=")[0])
    for path in paths:
        if arguments.get(path) == REDACTED or is_secret_name(path.rpartition(".")[2]):
            raise _make_secret_error(path)


def _make_secret_error(path: str) -> ConfigurationError:
    return ConfigurationError(
        f"{path} is a secret, and runs of a sweep are called by what they change: let the program "
        f"choose the secret by an argument that is none"
    )


def _is_done(run: RunDirectory, config: dict[str, Any]) -> bool:
    """Return whether a run is complete, and was started with a configuration. One that cannot be
    read is not: it is started, and says what is wrong while the others train."""
    try:
        # As JSON, because NaN is not equal to itself.
        return run.is_complete and dumps(run.read_manifest().get("configuration")) == dumps(config)
    except CheckpointError:
        return False


def _build_command(
    experiment: Callable[..., Any],
    overrides: Sequence[str],
    run_dir: Path,
    options: argparse.Namespace,
) -> list[str]:
    command = [sys.executable, *_get_program(experiment), *overrides]
    command += ["--run", str(run_dir), "--preempted-exit-code", str(options.preempted_exit_code)]
    if options.config is not None:
        command += ["--config", options.config]
    if options.from_run is not None:
        command += ["--from", options.from_run]
    for name in options.allow:
        command += ["--allow", name]
    if options.init_from is not None:
        command += ["--init-from", options.init_from]
    if not options.compilation_cache:
        command.append("--no-compilation-cache")
    return [*command, "--resume", options.resume, "--hyperparameters", options.hyperparameters]


def _get_program(experiment: Callable[..., Any]) -> list[str]:
    """Return the arguments of Python that run a program as this process does: as a module of its
    package if it was started by `python -m`, or its functions would have other names.

    `-P` keeps Python from importing from the current directory, unless that is where the package
    itself was found.
    """
    spec = sys.modules["__main__"].__spec__
    if experiment.__module__ == "__main__" and spec is not None:
        safe = [] if _is_in_current_directory(spec.name) else ["-P"]
        return [*safe, "-m", spec.name]
    return ["-P", "-m", "fulgurite_cli", "fit", inspect.getfile(experiment)]


def _is_in_current_directory(module: str) -> bool:
    """Return whether a module that is running was found in the current directory."""
    package = module.partition(".")[0]
    return PathFinder.find_spec(package, [os.getcwd()]) is not None and not sys.flags.safe_path


def _run_commands(
    commands: dict[str, list[str]], folder: Path, jobs: int
) -> tuple[dict[str, int], list[int]]:
    """Run commands, some at a time; return the exit codes of those that failed, and the signals
    that came."""
    waiting = list(commands)
    running: dict[str, SweptRun] = {}
    failed: dict[str, int] = {}
    num_handled = 0
    with note_signals() as received:
        while running or (waiting and not received):
            while waiting and len(running) < jobs and not received:
                name = waiting.pop(0)
                _tell(f"starting {name}")
                running[name] = SweptRun(
                    commands[name], folder / f"{name}.log" if jobs > 1 else None
                )
            # Here and not in the handler, which may interrupt the start of a run.
            new_signals = received[num_handled:]
            num_handled += len(new_signals)
            for number in new_signals:
                for run in running.values():
                    run.stop(number)
            for name, run in list(running.items()):
                code = run.poll()
                if code is not None:
                    del running[name]
                    _tell(f"{name} has ended with code {code}")
                    failed |= {name: code} if code and not received else {}
            time.sleep(POLL)
    return failed, received


def _tell(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone, and the runs are to be waited for
        print(text, flush=True)


@contextmanager
def note_signals() -> Iterator[list[int]]:
    """Note what asks this process to stop within the block; yield the list of those signals."""
    received: list[int] = []

    def note(number: int, _: Any) -> None:
        received.append(number)

    previous = {number: signal.getsignal(number) for number in SIGNALS}
    # As `nohup` ignores the end of the terminal.
    heard = [number for number, handler in previous.items() if handler != signal.SIG_IGN]
    for number in heard:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number in heard:
            signal.signal(number, previous[number])
