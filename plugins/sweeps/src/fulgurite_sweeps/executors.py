"""Where trials run: an executor starts a command, and hands out something to wait for."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fulgurite.errors import ConfigurationError
from fulgurite_cli import SweptRun

DEVICES = "CUDA_VISIBLE_DEVICES"
MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_NVIDIA = Path("/proc/driver/nvidia/gpus")
_USABLE = 0.9
"""Which part of a device's memory is divided among the trials that share it."""


@dataclass(frozen=True)
class Job:
    """What an executor starts.

    Example:
        from pathlib import Path

        from fulgurite_sweeps import Job

        job = Job(3, ["fulgurite", "fit", "digits.py", "--run", "trial-3"], {}, Path("trial-3.log"))

    Attributes:
        number: of the trial.
        command: what it runs, `fulgurite fit` with a run directory.
        environment: variables that it needs besides those of this process.
        log: the file that its output is appended to.
    """

    number: int
    command: list[str]
    environment: Mapping[str, str]
    log: Path


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
        """Return its exit code once it has ended."""
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

        from fulgurite_sweeps import Job


        class Printing:
            num_slots = 1

            def start(self, job: Job):
                print(job.command)
                return subprocess.Popen(["true"])  # a real one also has `stop`

    Attributes:
        num_slots: how many trials run at a time.
    """

    num_slots: int

    def start(self, job: Job) -> RunningJob:
        """Start a trial; called when fewer than `num_slots` run."""
        ...


class LocalExecutor:
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
        text: `local` or `local:N`.

    Raises:
        ConfigurationError: there is none of this name.
    """
    match = re.fullmatch(r"local(?::([0-9]{1,4}))?", text)
    if match is None:
        raise ConfigurationError(f"there are no workers {text!r}: give local:N, with N at a time")
    return LocalExecutor(int(match[1] or 1))


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
    memory = os.environ.get(MEMORY, f"{_USABLE / num_sharing:.3f}")
    return [{DEVICES: devices[slot % len(devices)], MEMORY: memory} for slot in range(num_slots)]
