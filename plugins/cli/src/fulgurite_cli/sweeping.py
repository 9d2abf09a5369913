"""Sweeps: a run for each combination of values, in a process and a run directory of its own."""

import argparse
import inspect
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite.redact import MASK, is_secret_name
from fulgurite_config import ConfigError
from fulgurite_config.paths import split_override
from fulgurite_config.sweeps import expand_axes, split_axis
from fulgurite_runs import RunDirectory
from fulgurite_runs.directory import expand_path
from fulgurite_runs.manifest import get_arguments

POLL = 0.05
"""Seconds between two looks whether a run has ended."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def plan_sweep(overrides: Sequence[str], axes: Sequence[str]) -> dict[str, list[str]]:
    """Return the overrides of each run of a sweep by its name, those of the last axis next to each
    other.

    Args:
        overrides: what all runs have.
        axes: texts as `fulgurite_config.sweep` takes them: `lr=1e-3,1e-2`.

    Raises:
        ConfigurationError: an axis is none, something is set twice, or two runs would be the
            same.
    """
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
    """Run all runs of a sweep that are not complete yet, or not with this configuration; return
    the exit code.

    A signal is handed to the runs, which save and end; the same command goes on with the rest.

    Args:
        experiment: the function of the program.
        options: of its command line.
        plan_config: returns the configuration of a run with such overrides, as its manifest will
            hold it, or raises an error of the overrides.

    Returns:
        0; 1 if a run failed; 130 or the code for SIGTERM after a signal.

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
        _check_no_secret(options.sweep, config)
    folder = Path(expand_path(options.run))
    if RunDirectory(folder).num_attempts:
        raise ConfigurationError(f"{folder} is a run: give a sweep a directory of its own")
    commands = {
        name: _build_command(experiment, overrides, folder / name, options)
        for name, overrides in runs.items()
        if not _is_done(RunDirectory(folder / name), configs[name])
    }
    print(f"{len(commands)} of {len(runs)} runs to do in {folder}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    failed, received = _run_commands(commands, folder, options.jobs)
    if not received:
        print(f"the runs are over; fulgurite runs {folder} compares them", flush=True)
    for name, code in failed.items():
        print(f"{name} failed with code {code}", file=sys.stderr)
    if received:
        return 130 if received[0] == signal.SIGINT else options.preempted_exit_code
    return 1 if failed else 0


def _plan(
    name: str, overrides: list[str], plan_config: Callable[[list[str]], dict[str, Any]]
) -> dict[str, Any]:
    """Return the configuration of a run of a sweep.

    Args:
        name: of the run, which an error of its overrides names.
        overrides: texts `name=value`.
        plan_config: returns the configuration.
    """
    try:
        return plan_config(overrides)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from error


def _check_no_secret(axes: Sequence[str], config: dict[str, Any]) -> None:
    """Raise a `ConfigurationError` if an axis changes a secret, whose values would be the names of
    folders.

    Args:
        axes: of the sweep.
        config: of one of its runs, in which secrets are masked.
    """
    arguments = get_arguments({"configuration": config})
    paths = [path for axis in axes for path in split_axis(axis)[0]]
    for path in paths:
        if arguments.get(path) == MASK or is_secret_name(path.rpartition(".")[2]):
            raise ConfigurationError(
                f"{path} is a secret, and runs of a sweep are called by what they change: let the "
                f"program choose the secret by an argument that is none"
            )


def _is_done(run: RunDirectory, config: dict[str, Any]) -> bool:
    """Return whether a run is complete, and was started with a configuration. One that cannot be
    read is not: it is started, and says what is wrong while the others train."""
    try:
        return run.is_complete and run.read_manifest().get("configuration") == config
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
    return [*command, "--resume", options.resume, "--hyperparameters", options.hyperparameters]


def _get_program(experiment: Callable[..., Any]) -> list[str]:
    """Return the arguments of Python that run a program as this process does: as a module of its
    package if it was started by `python -m`, or its functions would have other names."""
    spec = sys.modules["__main__"].__spec__
    if experiment.__module__ == "__main__" and spec is not None:
        return ["-m", spec.name]
    return ["-m", "fulgurite_cli", "fit", inspect.getfile(experiment)]


def _run_commands(
    commands: dict[str, list[str]], folder: Path, jobs: int
) -> tuple[dict[str, int], list[int]]:
    """Run commands, some at a time; return the exit codes of those that failed, and the signals
    that came."""
    waiting = list(commands)
    running: dict[str, subprocess.Popen[Any]] = {}
    failed: dict[str, int] = {}
    with _forward_signals(running) as received:
        while running or (waiting and not received):
            while waiting and len(running) < jobs and not received:
                name = waiting.pop(0)
                print(f"starting {name}", flush=True)
                running[name] = _start(commands[name], folder / f"{name}.log" if jobs > 1 else None)
            for name, process in list(running.items()):
                code = process.poll()
                if code is not None:
                    del running[name]
                    print(f"{name} has ended with code {code}", flush=True)
                    failed |= {name: code} if code and not received else {}
            time.sleep(POLL)
    return failed, received


def _start(command: list[str], log: Path | None) -> "subprocess.Popen[Any]":
    """Start a command in a session of its own, so that a terminal's Ctrl-C reaches it once."""
    if log is None:
        return subprocess.Popen(command, start_new_session=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            command, start_new_session=True, stdout=output, stderr=subprocess.STDOUT
        )


@contextmanager
def _forward_signals(running: "dict[str, subprocess.Popen[Any]]") -> Iterator[list[int]]:
    """Hand SIGINT and SIGTERM to processes within the block; yield the list of those that came."""
    received: list[int] = []

    def forward(number: int, _: Any) -> None:
        received.append(number)
        for process in list(running.values()):
            process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
