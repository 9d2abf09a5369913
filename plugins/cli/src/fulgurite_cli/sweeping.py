"""Sweeps: a run for each combination of values, in a process and a run directory of its own."""

import argparse
import itertools
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fulgurite.errors import ConfigurationError
from fulgurite_config import ConfigError
from fulgurite_config.sweeps import expand_axis
from fulgurite_runs import RunDirectory

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
        ConfigurationError: an axis is none, or two runs would be the same.
    """
    try:
        points = [expand_axis(axis) for axis in axes]
    except ConfigError as error:
        raise ConfigurationError(str(error)) from error
    runs: dict[str, list[str]] = {}
    for groups in itertools.product(*points):
        changes = list(itertools.chain.from_iterable(groups))
        name = make_run_name(changes)
        if name in runs:
            raise ConfigurationError(f"the sweep has {name} twice: leave one out")
        runs[name] = [*overrides, *changes]
    return runs


def make_run_name(changes: Sequence[str]) -> str:
    """Return what changes in a run as a folder may be called: Orbax takes `*`, `?` and `[` in a
    path for a pattern."""
    text = ",".join(changes).replace("**.", "").replace("*", "all")
    text = text.replace("[", ".").replace("]", "")
    return re.sub(r"[/\\?'\"\s]", "_", text)


def run_sweep(program: str, options: argparse.Namespace) -> int:
    """Run all runs of a sweep that are not complete yet, and return the exit code.

    A signal is handed to the runs, which save and end; the same command goes on with the rest.

    Args:
        program: the program's file.
        options: of its command line.

    Returns:
        0; 1 if a run failed; 130 or the code for SIGTERM after a signal.

    Raises:
        ConfigurationError: there is no `--run`, or an axis is none.
    """
    if options.run is None:
        raise ConfigurationError(
            "a sweep needs a directory in which each run gets one of its own: give --run DIR"
        )
    runs = plan_sweep(options.overrides, options.sweep)
    folder = Path(options.run)
    commands = {
        name: _build_command(program, overrides, folder / name, options)
        for name, overrides in runs.items()
        if not RunDirectory(folder / name).is_complete
    }
    print(f"{len(commands)} of {len(runs)} runs to do in {folder}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    failed, received = _run_commands(commands, folder, options.jobs)
    for name, code in failed.items():
        print(f"{name} failed with code {code}", file=sys.stderr)
    if received:
        return 130 if received[0] == signal.SIGINT else options.preempted_exit_code
    return 1 if failed else 0


def _build_command(
    program: str, overrides: Sequence[str], run_dir: Path, options: argparse.Namespace
) -> list[str]:
    command = [sys.executable, "-m", "fulgurite_cli", "fit", program, *overrides]
    command += ["--run", str(run_dir), "--preempted-exit-code", str(options.preempted_exit_code)]
    if options.config is not None:
        command += ["--config", options.config]
    if options.from_run is not None:
        command += ["--from", options.from_run]
    if options.init_from is not None:
        command += ["--init-from", options.init_from]
    return [*command, "--resume", options.resume]


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
