"""Where trials run: an executor starts a command, and hands out something to wait for."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fulgurite.errors import CheckpointError, ConfigurationError
from fulgurite_cli import SweptRun
from fulgurite_runs import RunDirectory

DEVICES = "CUDA_VISIBLE_DEVICES"
MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_NVIDIA = Path("/proc/driver/nvidia/gpus")
USABLE = 0.9
"""Which part of a device's memory is divided among the trials that share it."""
LOST = -1000
"""In place of an exit code: the machine that ran the trial is gone."""


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

    def check(self, samples: Sequence[Job]) -> None:
        """Raise a `ConfigurationError` if trials cannot run here; called before the first of them.

        Args:
            samples: jobs that are not started, with each choice of the search space, and with the
                smallest and the largest of each range.
        """
        del samples

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


def find_devices() -> list[str]:
    """Return the names of the GPUs that this process may use, without starting any of them."""
    visible = os.environ.get(DEVICES)
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        # CUDA hides the first invalid one, for which people write -1, and all behind it.
        return list(itertools.takewhile(lambda name: not name.startswith("-"), names))
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
