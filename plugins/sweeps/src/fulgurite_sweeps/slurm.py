"""Sweeps on a SLURM cluster: a job array, each of whose jobs drives the same sweep.

No process has to stay where the jobs were submitted: drivers share a sweep by its directory, and
what a job leaves whose machine is lost, the others take over.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fulgurite.errors import ConfigurationError

from fulgurite_sweeps.workers import Workers, read_numbers

SUBMIT = "sbatch"
SECONDS_TO_SAVE = 60
"""How long before the end of its time a job is told to save."""


@dataclass(frozen=True)
class JobArray:
    """A job array that is about to be submitted.

    Attributes:
        command: `sbatch` with all its options.
        environment: variables that it has besides those of this process.
    """

    command: list[str]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.command)])

    def submit(self, tell: Callable[[str], None]) -> None:
        """Submit it.

        Args:
            tell: gets the command, and what `sbatch` says.

        Raises:
            ConfigurationError: there is no `sbatch`, or it refuses the job.
        """
        if shutil.which(self.command[0]) is None:
            raise ConfigurationError(
                f"there is no program {self.command[0]!r} on this machine: start the sweep where "
                "jobs of SLURM are submitted"
            )
        tell(str(self))
        environment = {**os.environ, **self.environment}
        ended = subprocess.run(self.command, env=environment, capture_output=True, text=True)
        if ended.returncode:
            raise ConfigurationError(
                f"{self.command[0]} has refused the job array: "
                f"{ended.stderr.strip() or f'exit code {ended.returncode}'}"
            )
        tell(ended.stdout.strip())


def plan_job_array(
    workers: Workers, arguments: Sequence[str], folder: Path, num_trials: int
) -> JobArray:
    """Return the job array of a sweep.

    Args:
        workers: `slurm`, perhaps with the name of a launch profile, and with the arguments `jobs`,
            how many there are at most, and `slots`, how many trials each has at a time.
        arguments: the command line after `fulgurite sweep`.
        folder: of the sweep.
        num_trials: how many are left to do.

    Raises:
        ConfigurationError: there is no such profile, it does not start `sbatch`, or an argument is
            none.
    """
    numbers = read_numbers(workers.call, ("jobs", "slots"))
    slots, jobs = numbers.get("slots", 1), numbers.get("jobs", num_trials)
    if type(slots) is not int or type(jobs) is not int or min(slots, jobs) < 1:
        raise ConfigurationError(f"slurm: jobs={jobs} and slots={slots}: give integers above 0")
    words, environment = _read_profile(workers.where)
    num_jobs = min(jobs, -(-num_trials // slots))
    options = [
        f"--job-name={folder.name}",
        f"--output={folder / 'slurm-%A_%a.log'}",
        "--open-mode=append",  # a job that is requeued has the same log
        f"--signal=B:TERM@{SECONDS_TO_SAVE}",
    ]
    command = [sys.executable, "-P", "-m", "fulgurite_cli", "sweep"]
    # A job that waits for the others would hold its devices for nothing.
    command += _add_options(arguments, "--workers", f"local:{slots}", "--no-wait")
    # `exec`, so that the signal reaches the driver, which hands it to its trials.
    wrapped = f"exec {shlex.join(command)}"
    array = f"--array=0-{num_jobs - 1}"
    return JobArray([words[0], *options, *words[1:], array, f"--wrap={wrapped}"], environment)


def _read_profile(name: str | None) -> tuple[list[str], Mapping[str, str]]:
    """Return the words that submit a job, and variables for it.

    Args:
        name: of a launch profile; None without one.
    """
    if name is None:
        return [SUBMIT], {}
    try:
        from fulgurite_sharding import read_profile
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "launch profiles are those of fulgurite-sharding: pip install 'fulgurite-sweeps[slurm]'"
        ) from error
    profile, where = read_profile(name)
    words = profile.fill_command(where) or [SUBMIT]
    if Path(words[0]).name != SUBMIT:
        raise ConfigurationError(
            f"{where} starts {words[0]}, and job arrays are submitted by {SUBMIT}: write "
            f"command = ['{SUBMIT}', '--partition=...'] into a profile"
        )
    return words, profile.environment


def _add_options(arguments: Sequence[str], *options: str) -> list[str]:
    """Return a command line with further options, which count instead of the same ones in it.

    Args:
        arguments: the command line.
        *options: what is added.
    """
    index = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:index], *options, *arguments[index:]]
