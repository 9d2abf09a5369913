"""The command `fulgurite launch`: a program as several processes on this machine."""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

from fulgurite.errors import ConfigurationError

from fulgurite_sharding.distributed import VARIABLE, Group

LAST_LINES = 20
# What a program exits with that was told to stop: no failure, so that the others may stop as well.
STOPPED = (130, 143)
GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""


def launch(arguments: list[str]) -> int:
    """Runs the command; gives 0, or the exit code of the process that failed or was stopped
    first."""
    parser = argparse.ArgumentParser(
        "fulgurite launch",
        description=(
            "Runs a program as several processes on this machine, connected before it is imported:"
            " with the GPUs divided among them, else on the CPU. SIGINT and SIGTERM are handed on;"
            " when one process fails, the others are ended."
        ),
    )
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="how many")
    parser.add_argument(
        "--timeout", type=int, default=300, metavar="SECONDS", help="wait for all (default: 300)"
    )
    parser.add_argument(
        "--heartbeat",
        type=int,
        default=10,
        metavar="SECONDS",
        help="without a sign of life a process counts as dead (default: 10)",
    )
    parser.add_argument(
        "--logs",
        type=Path,
        metavar="DIR",
        help="the output of process N also goes to DIR/process-N.log",
    )
    parser.add_argument("program", metavar="PROGRAM", help="a Python file")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="for the program"
    )
    options = parser.parse_args(arguments)
    try:
        if options.processes < 1 or options.timeout < 1 or options.heartbeat < 1:
            raise ConfigurationError("--processes, --timeout and --heartbeat are at least 1")
        if not Path(options.program).is_file():
            raise ConfigurationError(f"there is no Python file {options.program}")
        devices = _devices(options.processes)
        if options.logs:
            options.logs.mkdir(parents=True, exist_ok=True)
    except ConfigurationError as error:
        parser.exit(2, f"error: {error}\n")
    except OSError as error:
        parser.exit(
            2, f"error: --logs {options.logs} is no folder that can be written to: {error}\n"
        )
    command = [
        sys.executable,
        "-m",
        "fulgurite_sharding.launched",
        options.program,
        *options.arguments,
    ]
    with _reserved_port() as port, _noted_signals() as received, ExitStack() as stack:
        members, ended = [], SimpleQueue[_Member]()
        for number in range(options.processes):
            group = Group(
                f"127.0.0.1:{port}", options.processes, number, options.timeout, options.heartbeat
            )
            environment = {
                **os.environ,
                **devices[number],
                VARIABLE: str(group),
                "PYTHONUNBUFFERED": "1",
            }
            log = options.logs / f"process-{number}.log" if options.logs else None
            members.append(_Member(number, options.processes, command, environment, log, ended))
            stack.callback(members[-1].kill)
        return _watch(members, ended, received)


class _Member:
    """One of the processes, whose lines are passed on: those of process 0 as they are, others' with
    their number."""

    def __init__(
        self,
        number: int,
        count: int,
        command: list[str],
        environment: dict[str, str],
        log: Path | None,
        ended: "SimpleQueue[_Member]",
    ) -> None:
        self.name = f"process {number} of {count}"
        # One for each stream, because which of two streams was written to last cannot be told here.
        self._tails: list[deque[str]] = [deque(maxlen=LAST_LINES) for _ in range(2)]
        # A session of its own: Ctrl-C reaches it once, through us. It ends when its standard input
        # does, with us.
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._prefix = f"[{number}] " if number else ""
        self._log = log.open("w") if log else None
        streams = zip(
            (self.process.stdout, self.process.stderr),
            (sys.stdout, sys.stderr),
            self._tails,
            strict=True,
        )
        self._readers = [
            threading.Thread(target=self._pass_on, args=stream, daemon=True) for stream in streams
        ]
        for thread in (
            *self._readers,
            threading.Thread(target=self._wait, args=(ended,), daemon=True),
        ):
            thread.start()

    def signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Ends it and all that it started, and waits for that and for its last lines."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for reader in self._readers:
            reader.join(timeout=1.0)  # what it has started may still hold the pipes
        if self._log:
            self._log.close()
            self._log = None

    @property
    def tail(self) -> list[str]:
        """Its last lines, what it wrote to standard error behind the others."""
        return [line for tail in self._tails for line in tail][-LAST_LINES:]

    def _wait(self, ended: "SimpleQueue[_Member]") -> None:
        self.process.wait()
        ended.put(self)

    def _pass_on(self, source: IO[str], target: IO[str], tail: deque[str]) -> None:
        places = [(target, self._prefix), *([(self._log, "")] if self._log else [])]
        for line in source:
            tail.append(line)
            for place in tuple(places):
                try:
                    place[0].write(place[1] + line)
                    place[0].flush()
                except OSError as error:
                    # A closed pipe, a full disk: whoever is not read any more would wait for ever.
                    places.remove(place)
                    with suppress(OSError):
                        what = "its log" if place[0] is self._log else "what it prints"
                        print(
                            f"{self.name}: {what} can no longer be passed on: {error}",
                            file=sys.stderr,
                            flush=True,
                        )


def _watch(members: list[_Member], arriving: "SimpleQueue[_Member]", received: list[int]) -> int:
    """Waits for all to end; hands signals on; ends the others when one has failed. Gives the exit
    code."""
    running, ended = list(members), []
    handed_on, deadline = 0, float("inf")
    while running:
        # In their order: what one failed of often makes the others fail a few milliseconds later.
        with suppress(Empty):
            member = arriving.get(timeout=0.05)
            running.remove(member)
            ended.append(member)
            if member.process.returncode not in (0, *STOPPED) and deadline == float("inf"):
                deadline = time.monotonic() + GRACE
                for other in running:
                    other.signal(signal.SIGTERM)
        for number in received[handed_on:]:
            handed_on += 1
            for member in running:
                member.signal(number)
            if handed_on > 1:  # asked twice: they need not come to an end in order
                deadline = min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline:
            for member in running:
                member.kill()
    for member in members:
        member.kill()  # for its last lines
    return _report(ended)


def _report(ended: list[_Member]) -> int:
    """Say what failed first, if anything did, and return the exit code."""
    failed = [member for member in ended if member.process.returncode not in (0, *STOPPED)]
    unsuccessful = failed or [member for member in ended if member.process.returncode]
    if not unsuccessful:
        return 0
    first = unsuccessful[0]
    code = first.process.returncode
    if failed:
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        print(f"{first.name} {how}. Its last lines:", file=sys.stderr)
        print("".join(f"    {line}" for line in first.tail), end="", file=sys.stderr)
    return 128 - code if code < 0 else code


@contextmanager
def _reserved_port() -> Iterator[int]:
    """A free port on loopback, which nobody else gets: JAX's coordinator, which shares ports, binds
    it as well."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """A list to which SIGINT and SIGTERM are added as they come."""
    received: list[int] = []
    former = {
        one: signal.signal(one, lambda number, _: received.append(number))
        for one in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for one, handler in former.items():
            signal.signal(one, handler)


def _devices(processes: int) -> list[dict[str, str]]:
    """What tells each process its devices: an equal part of the GPUs; nothing on a machine
    without."""
    platform = os.environ.get("JAX_PLATFORMS", "").partition(",")[0]
    gpus = [] if platform not in ("", "cuda", "gpu") else _gpus()
    if not gpus:
        return [{}] * processes
    share, rest = divmod(len(gpus), processes)
    if rest:
        raise ConfigurationError(
            f"{processes} processes cannot have an equal part of {len(gpus)} GPUs: change"
            " --processes or CUDA_VISIBLE_DEVICES, or set JAX_PLATFORMS=cpu"
        )
    parts = [gpus[number * share : (number + 1) * share] for number in range(processes)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts]


def _gpus() -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [one for one in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if one]
    if not shutil.which("nvidia-smi"):
        return []
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    return [
        str(number)
        for number, line in enumerate(listed.stdout.splitlines())
        if line.startswith("GPU")
    ]
