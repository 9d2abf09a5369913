"""What runs a trial on a machine of a Ray cluster, in a process that Ray starts there."""

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from fulgurite_cli import SweptRun

_POLL = 0.05
"""Seconds between two looks whether the trial has ended."""


class TrialRunner:
    """Runs one trial. The trial saves and ends when this process is gone."""

    def __init__(self) -> None:
        self._run: SweptRun | None = None
        self._is_stopped = False
        self._lock = threading.Lock()

    def greet(self) -> None:
        """Answer, once there is a place for the trial."""

    def run(self, command: list[str], folder: str, log: str, environment: Mapping[str, str]) -> int:
        """Run the trial, and return its exit code.

        Args:
            command: what it runs; the Python of this machine takes the place of its first word.
            folder: in which it runs.
            log: the file that its output is appended to.
            environment: variables that it has besides those of this process.

        Raises:
            OSError: this machine does not see the folder.
        """
        os.chdir(folder)
        with self._lock:
            if self._is_stopped:
                return -signal.SIGTERM
            self._run = SweptRun([sys.executable, *command[1:]], Path(log), environment)
        while True:
            with self._lock:
                code = self._run.poll()
            if code is not None:
                return code
            time.sleep(_POLL)

    def stop(self, number: int) -> None:
        """Ask the trial to save and end.

        Args:
            number: of the signal.
        """
        with self._lock:
            self._is_stopped = True
            if self._run is not None:
                self._run.stop(number)
