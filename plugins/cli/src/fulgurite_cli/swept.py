"""A run of a sweep in a process of its own: both ends of what connects it with the sweep."""

import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_VARIABLE = "FULGURITE_SWEEP_PIPE"


class SweptRun:
    """A process that runs a command, and stops as by SIGTERM if this process ends before it.

    It has a session of its own, so that a terminal's Ctrl-C reaches it once, through us.

    Args:
        command: what it runs.
        log: a file that its output is appended to; None for that of this process.
        environment: variables that it has besides those of this process.

    Example:
        import sys

        from fulgurite_cli import SweptRun

        run = SweptRun([sys.executable, "-c", "print(1)"], log=None)
        while run.poll() is None:
            pass
    """

    def __init__(
        self, command: list[str], log: Path | None, environment: Mapping[str, str] | None = None
    ) -> None:
        # It ends with this process, however that ends.
        read_end, self._write_end = os.pipe()
        try:
            self._process = _start(command, log, read_end, environment or {})
        except BaseException:
            os.close(self._write_end)
            raise
        finally:
            os.close(read_end)

    def poll(self) -> int | None:
        """Return its exit code once it has ended."""
        code = self._process.poll()
        if code is not None and self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1
        return code

    def stop(self, number: int) -> None:
        """Send it a signal; SIGTERM for the end of our terminal, of which it knows nothing.

        Args:
            number: of the signal that this process received.
        """
        if self._write_end < 0:
            return
        with suppress(BrokenPipeError):  # it has ended
            os.write(self._write_end, b"\0")
        self._process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)


def _start(
    command: list[str], log: Path | None, pipe: int, variables: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, **variables, _VARIABLE: str(pipe)}
    if log is None:
        return subprocess.Popen(command, env=environment, pass_fds=(pipe,), start_new_session=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=environment,
            pass_fds=(pipe,),
            start_new_session=True,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def stop_with_sweep() -> None:
    """In a run of a sweep: stop as by SIGTERM, which saves, once the sweep was killed."""
    descriptor = os.environ.pop(_VARIABLE, None)  # not for the processes that this one starts
    if descriptor is not None:
        pipe = int(descriptor)
        os.set_inheritable(pipe, False)
        threading.Thread(target=_wait_for_end, args=(pipe,), daemon=True).start()


def _wait_for_end(pipe: int) -> None:
    """Wait until the sweep is gone, and stop unless it has asked for that itself: a second signal
    would end this process before it has saved."""
    is_stopping = False
    while os.read(pipe, 1):
        is_stopping = True
    if not is_stopping:
        os.kill(os.getpid(), signal.SIGTERM)
