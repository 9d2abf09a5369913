"""Trials as members of a population: several in one program, which costs less than as many runs.

The population is a run of its own, `population-0-3` in the directory of the sweep, with the
checkpoints of all, and what it trains is in `population-0-3.json`. When it has ended, each trial
gets a run directory with its part of the records. A trial that was in a population that was cut
off, or whose end was not told, continues in that one, with whatever trials it has.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fulgurite.errors import ConfigurationError
from fulgurite_cli import SweptRun
from fulgurite_runs import RunDirectory, dumps, loads, replace_file

from fulgurite_sweeps.executors import Executor, Job, is_in_use
from fulgurite_sweeps.members import (
    RECORDS,
    REFUSED,
    VARIABLE,
    PopulationSettings,
    find_population,
    get_folder,
    read_results,
    take_record,
)
from fulgurite_sweeps.results import TrialResult, write_result
from fulgurite_sweeps.trial import VARIABLE as TRIAL_VARIABLE

_PROGRAM = Path(__file__).with_name("population_program.py")
_CHECK = "fulgurite_sweeps.population_check"
"""The module that is started to compare trials: it imports jax, as the driver does not."""
_TAIL = 20_000
"""How many bytes of what a population printed go to the log of each trial, if it failed."""


class PopulationExecutor(Executor):
    """Trains several trials at a time as members of one population, of `fulgurite-population`.

    They may differ in what a population can vary: numbers in the optimizer's state
    (`optax.inject_hyperparams`), arrays of the module, and the seed. Members that run together
    differ from runs of their own by rounding.

    Example:
        from fulgurite_sweeps import PopulationExecutor

        executor = PopulationExecutor(4)

    Args:
        num_slots: how many members a population has at most.
        exact: whether members run one after the other, with the bits of runs of their own on a CPU.
            Nothing is gained in time but that of the start.

    Raises:
        ConfigurationError: there is less than one member.
    """

    def __init__(self, num_slots: int = 4, *, exact: bool = False) -> None:
        if num_slots < 1:
            raise ConfigurationError(f"population:{num_slots} trains nothing: give 1 or more")
        if find_spec("fulgurite_population") is None:
            raise ConfigurationError(
                "trials as a population need it: pip install 'fulgurite-sweeps[population]'"
            )
        self.num_slots = num_slots
        self._is_exact = exact
        self._next: _Group | None = None
        self._resumed: dict[Path, _Group] = {}

    def check(self, samples: Sequence[Job]) -> None:
        """Raise a `ConfigurationError` if trials differ in more than a population can vary."""
        _check_job(samples[0])
        settings = _describe(samples, self._is_exact)
        environment = os.environ | {VARIABLE: json.dumps(asdict(settings))}
        command = [sys.executable, "-P", "-m", _CHECK]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        # A program that fails with some values fails in the trials that have them.
        if ended.returncode == REFUSED:
            raise ConfigurationError(
                f"trials of this sweep cannot be members of one population: "
                f"{ended.stderr.strip().removeprefix('error: ')}"
            )

    def start(self, job: Job) -> "PopulationJob":
        """Add a trial to the population that it was in, or to the one that begins next."""
        group = self._find_group(job)
        group.jobs.append(job)
        return PopulationJob(group, job)

    def _find_group(self, job: Job) -> "_Group":
        settings = find_population(job)
        if settings is None:
            if self._next is None or self._next.has_begun:
                self._next = _Group(self._is_exact)
            return self._next
        folder = get_folder(job, settings.numbers)
        group = self._resumed.get(folder)
        if group is None or group.has_ended:
            group = self._resumed[folder] = _Group(settings.is_exact, settings)
        return group


class PopulationJob:
    """A trial that is a member of a population.

    Args:
        group: the population, which begins when the driver first asks how it stands.
        job: the trial.
    """

    def __init__(self, group: "_Group", job: Job) -> None:
        self._group = group
        self._job = job
        self._num_stops = 0

    def poll(self) -> int | None:
        """Return the exit code of the population once it has ended; 1 for a member that failed."""
        return self._group.poll(self._job.number)

    def stop(self, number: int) -> None:
        """Ask the population to save and end, once for all its members.

        Args:
            number: of the signal that this process received.
        """
        self._num_stops += 1
        self._group.stop(number, self._num_stops)


class _Group:
    """A population, from its first trial in line to the results of all.

    Args:
        is_exact: whether its members run one after the other.
        settings: of one that had begun; None for a new one. It may have members that are no trials
            of this driver.
    """

    def __init__(self, is_exact: bool, settings: PopulationSettings | None = None) -> None:
        self.jobs: list[Job] = []
        self._is_exact = is_exact
        self._settings = settings
        self._process: SweptRun | None = None
        self._codes: dict[int, int] | None = None
        self._num_stops = 0

    @property
    def has_begun(self) -> bool:
        """Whether it takes no further trials."""
        return self._process is not None or self._codes is not None

    @property
    def has_ended(self) -> bool:
        """Whether it takes no trial that it had already, either."""
        return self._codes is not None

    @property
    def settings(self) -> PopulationSettings:
        """What it trains: all that had joined when it was first asked for."""
        if self._settings is None:
            jobs = sorted(self.jobs, key=lambda job: job.number)
            self._settings = _describe(jobs, self._is_exact)
        return self._settings

    @property
    def folder(self) -> Path:
        """The run directory of the population."""
        return get_folder(self.jobs[0], self.settings.numbers)

    def poll(self, number: int) -> int | None:
        """Return the exit code of a trial once the population has ended.

        Args:
            number: of the trial.
        """
        if self._codes is None:
            self._advance()
        return None if self._codes is None else self._codes[number]

    def stop(self, signal_number: int, count: int) -> None:
        """Hand a signal to the population, unless it was for another member already.

        Args:
            signal_number: of the signal.
            count: how many signals the member has received.
        """
        if count <= self._num_stops:
            return
        self._num_stops = count
        if self._process is not None:
            self._process.stop(signal_number)
        elif self._codes is None:
            self._codes = {job.number: -signal_number for job in self.jobs}

    def _advance(self) -> None:
        """Begin, or see whether it has ended."""
        if self._process is None:
            if RunDirectory(self.folder).is_complete:
                self._codes = self._finish()
            elif not is_in_use(self.folder):  # a population whose driver was killed still saves
                self._process = self._start()
            return
        code = self._process.poll()
        if code is None:
            return
        if code == 0 and RunDirectory(self.folder).is_complete:
            self._codes = self._finish()
            return
        for job in self.jobs:
            _copy_tail(self._log, job.log)
        self._codes = {job.number: code for job in self.jobs}

    @property
    def _log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    def _start(self) -> SweptRun:
        settings = json.dumps(asdict(self.settings))
        replace_file(self.folder.with_name(f"{self.folder.name}.json"), settings)
        command = [sys.executable, "-P", "-m", "fulgurite_cli", "fit", str(_PROGRAM)]
        environment = {VARIABLE: settings}
        return SweptRun([*command, "--run", str(self.folder)], self._log, environment)

    def _finish(self) -> dict[int, int]:
        """Write what each trial has left into its run directory; return their exit codes.

        A driver that is killed here leaves trials that the next one finishes.
        """
        results = read_results(self.folder, len(self.settings.numbers))
        records = [loads(line) for line in _read_lines(self.folder / RECORDS)]
        manifest = RunDirectory(self.folder).read_manifest()
        codes = {}
        for job in self.jobs:
            index = self.settings.numbers.index(job.number)
            result = results[index]
            # A member that failed has none of its end; a run alone would have ended there.
            lines = [
                take_record(record, index, result["configuration"])
                for record in records
                if result["error"] is None or record["step"] < result["step"]
            ]
            _write_run(job.run_dir, manifest | {"configuration": result["configuration"]}, lines)
            codes[job.number] = _end_run(job, result)
        return codes


def _check_job(job: Job) -> None:
    """Raise a `ConfigurationError` if a trial cannot be a member of a population."""
    if json.loads(job.environment[TRIAL_VARIABLE])["pruner"] is not None:
        raise ConfigurationError(
            "the trials of a population end together: leave the pruner out, or take local:N"
        )
    if job.command[-2:] != ["--run", str(job.run_dir)]:
        raise ConfigurationError(
            "options of fulgurite fit are not for the trials of a population: leave out what "
            "stands behind --, or take local:N"
        )


def _describe(jobs: Sequence[Job], is_exact: bool) -> PopulationSettings:
    """Return what a population is told.

    Args:
        jobs: its members.
        is_exact: whether they run one after the other.
    """
    return PopulationSettings(
        program=_get_program(jobs[0]),
        numbers=[job.number for job in jobs],
        overrides=[list(job.overrides) for job in jobs],
        is_exact=is_exact,
    )


def _get_program(job: Job) -> str:
    """Return the program of a trial, which stands before its overrides."""
    return job.command[job.command.index("fit") + 1]


def _read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def _write_run(path: Path, manifest: dict[str, Any], lines: Sequence[dict[str, Any]]) -> None:
    """Write a run directory with records.

    Args:
        path: of the directory.
        manifest: of its attempt.
        lines: its records.
    """
    run = RunDirectory(path)
    with run.lock():
        run.start_attempt(dumps(manifest))
        if lines:
            text = "".join(dumps(line, sort_keys=True) + "\n" for line in lines)
            replace_file(path / RECORDS, text)


def _end_run(job: Job, result: dict[str, Any]) -> int:
    """Write how a trial has ended, as its run would; return its exit code.

    Args:
        job: the trial.
        result: how it has ended.
    """
    if result["error"] is not None:
        with job.log.open("a") as log:
            log.write(f"error: {result['error']}\n")
        return 1
    write_result(job.run_dir, TrialResult(result["step"], result["metrics"]))
    run = RunDirectory(job.run_dir)
    with run.lock():
        run.mark_complete()
    return 0


def _copy_tail(source: Path, target: Path) -> None:
    with source.open("rb") as file, target.open("ab") as log:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        log.write(file.read())
