"""Where trials run: an executor starts a command, and hands out something to wait for."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from fulgurite.errors import CheckpointError, ConfigurationError, did_you_mean
from fulgurite_cli import SweptRun
from fulgurite_runs import RunDirectory

from fulgurite_sweeps.calls import Call, parse_call

DEVICES = "CUDA_VISIBLE_DEVICES"
MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_NVIDIA = Path("/proc/driver/nvidia/gpus")
USABLE = 0.9
"""Which part of a device's memory is divided among the trials that share it."""
LOST = -1000
"""In place of an exit code: the machine that ran the trial is gone."""
_WORKERS = re.compile(r"([a-z]+)(?::([^()]+))?(?:\((.*)\))?")
_NUMBER = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


@dataclass(frozen=True)
class Job:
    """What an executor starts.

    Example:
        from pathlib import Path

        from fulgurite_sweeps import Job

        command = ["fulgurite", "fit", "digits.py", "--run", "trial-3"]
        job = Job(3, command, {}, Path("trial-3.log"), Path("trial-3"))

    Attributes:
        number: of the trial.
        command: what it runs in the current directory, `fulgurite fit` with a run directory; its
            first word is the Python of this process.
        environment: variables that it needs besides those of this process.
        log: the file that its output is appended to.
        run_dir: the run directory in the command.
        overrides: the strings `path=value` in the command.
    """

    number: int
    command: list[str]
    environment: Mapping[str, str]
    log: Path
    run_dir: Path
    overrides: tuple[str, ...] = ()


class RunningJob(Protocol):
    """A job that was started.

    Example:
        import subprocess

        from fulgurite_sweeps import RunningJob


        class RunningCommand:
            def __init__(self, command: list[str]) -> None:
                self.process = subprocess.Popen(command)

            def poll(self) -> int | None:
                return self.process.poll()

            def stop(self, number: int) -> None:
                self.process.send_signal(number)


        job: RunningJob = RunningCommand(["true"])
        while job.poll() is None:
            pass
    """

    def poll(self) -> int | None:
        """Return its exit code once it has ended; a negative one is the number of the signal that
        ended it, and `LOST` says that the machine is gone. Such a trial is started again."""
        ...

    def stop(self, number: int) -> None:
        """Ask it to save and end.

        Args:
            number: of the signal that this process received.
        """
        ...


class Executor(Protocol):
    """What runs the trials of a sweep.

    A trial that it starts has the run directory in its command, and so must see the directory of
    the sweep. When the driver is killed, it must save and end; another driver resumes it.

    Example:
        import subprocess

        from fulgurite_sweeps import Executor, Job


        class Printing(Executor):
            num_slots = 1

            def start(self, job: Job):
                print(job.command)
                return subprocess.Popen(["true"])  # a real one also has `stop`

    Attributes:
        num_slots: how many trials run at a time, once it is open.
    """

    num_slots: int

    def open(self, folder: Path, tell: Callable[[str], None]) -> AbstractContextManager[None]:
        """Return what holds all that trials need: it is entered before the first of them starts,
        and left after the last has ended.

        Args:
            folder: of the sweep.
            tell: gets what the user should know.
        """
        del folder, tell
        return nullcontext()

    def start(self, job: Job) -> RunningJob:
        """Start a trial; called when fewer than `num_slots` run."""
        ...


class LocalExecutor(Executor):
    """Runs trials in processes of this machine, which divide its devices.

    With as many devices as trials at a time, or more, each has devices of its own. With fewer,
    several share one, and its memory.

    Example:
        from fulgurite_sweeps import LocalExecutor

        executor = LocalExecutor(2)

    Args:
        num_slots: how many trials run at a time.

    Raises:
        ConfigurationError: it is less than one.
    """

    def __init__(self, num_slots: int = 1) -> None:
        if num_slots < 1:
            raise ConfigurationError(f"local:{num_slots} runs nothing: give 1 or more")
        self.num_slots = num_slots
        self._devices = divide_devices(find_devices(), num_slots)
        self._jobs: list[SweptRun | None] = [None] * num_slots

    def start(self, job: Job) -> RunningJob:
        """Start a process for a trial."""
        slot = next(
            index
            for index, running in enumerate(self._jobs)
            if running is None or running.poll() is not None
        )
        environment = {**self._devices[slot], **job.environment}
        run = self._jobs[slot] = SweptRun(job.command, job.log, environment)
        return run


def parse_executor(text: str) -> Executor:
    """Return the executor that the command line names.

    Args:
        text: `local`, `local:N`, `ray`, `ray:ADDRESS` or `population:N`, the last two perhaps with
            arguments: `ray(gpus=1)`.

    Raises:
        ConfigurationError: there is none of this name, or it has no such argument.
    """
    workers = parse_workers(text)
    if workers.name == "local" and not workers.call.keywords:
        return LocalExecutor(_parse_count(workers.where or "1", text))
    if workers.name == "ray":
        from fulgurite_sweeps.ray_executor import RayExecutor

        return RayExecutor(workers.where, **read_numbers(workers.call, ("cpus", "gpus", "slots")))
    if workers.name == "population" and not workers.call.keywords.keys() - {"exact"}:
        from fulgurite_sweeps.population_executor import PopulationExecutor

        is_exact = workers.call.keywords.get("exact", "false").lower()
        if is_exact in ("true", "false"):
            count = _parse_count(workers.where or "4", text)
            return PopulationExecutor(count, exact=is_exact == "true")
    raise _make_workers_error(text)


class Workers(NamedTuple):
    """Where trials run, as the command line names it: `NAME:WHERE(key=value)`.

    Attributes:
        name: `local`, `ray`, ...
        where: a number of processes, an address or a name; None without one.
        call: the arguments.
    """

    name: str
    where: str | None
    call: Call


def parse_workers(text: str) -> Workers:
    """Return what a string says about where trials run.

    Args:
        text: such as `ray:10.0.0.1:6379(gpus=1)`.

    Raises:
        ConfigurationError: it has another form.
    """
    match = _WORKERS.fullmatch(text)
    call = parse_call(f"{match[1]}({match[3] or ''})") if match is not None else None
    if match is None or call is None or call.arguments:
        raise _make_workers_error(text)
    return Workers(match[1], match[2], call)


def read_numbers(call: Call, known: Sequence[str]) -> dict[str, float]:
    """Return the arguments of workers, which are numbers.

    Args:
        call: the workers.
        known: the names of the arguments that they have.

    Raises:
        ConfigurationError: there is no such argument, or a value is not a number above or at 0.
    """
    numbers = {}
    for name, value in call.keywords.items():
        if name not in known:
            raise ConfigurationError(
                f"{call.name} has no argument {name!r}. {did_you_mean(name, known)}"
            )
        if not _NUMBER.fullmatch(value):
            raise ConfigurationError(f"{call.name}: {name}={value} is not a number: give 1, or 0.5")
        numbers[name] = float(value) if "." in value else int(value)
    return numbers


def is_in_use(run_dir: Path) -> bool:
    """Return whether the process of a trial may still write, as far as this machine can tell.

    Args:
        run_dir: of the trial.
    """
    try:
        entry = RunDirectory(run_dir).read_owner()
    except CheckpointError:
        return False  # it is not there; what is wrong with it, the next start says
    return entry is not None and entry[0].is_running(entry[1])


def _parse_count(text: str, workers: str) -> int:
    """Return a number of trials at a time.

    Args:
        text: what stands behind the colon.
        workers: all that was written, for the error.
    """
    if not text.isdecimal() or len(text) > 4:
        raise _make_workers_error(workers)
    return int(text)


def _make_workers_error(text: str) -> ConfigurationError:
    return ConfigurationError(
        f"there are no workers {text!r}: give local:N or population:N, with N at a time, ray, "
        "ray:ADDRESS, slurm or slurm:PROFILE"
    )


def find_devices() -> list[str]:
    """Return the names of the GPUs that this process may use, without starting any of them."""
    visible = os.environ.get(DEVICES)
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    return [str(index) for index, _ in enumerate(_NVIDIA.iterdir())] if _NVIDIA.is_dir() else []


def divide_devices(devices: list[str], num_slots: int) -> list[dict[str, str]]:
    """Return the variables that give each slot its devices.

    Args:
        devices: their names.
        num_slots: how many trials run at a time.
    """
    if not devices:
        return [{} for _ in range(num_slots)]
    if len(devices) >= num_slots:
        return [{DEVICES: ",".join(devices[slot::num_slots])} for slot in range(num_slots)]
    num_sharing = -(-num_slots // len(devices))
    memory = os.environ.get(MEMORY, f"{USABLE / num_sharing:.3f}")
    return [{DEVICES: devices[slot % len(devices)], MEMORY: memory} for slot in range(num_slots)]
