"""The command `fulgurite launch`: a program as several processes on this machine."""

import argparse
import io
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, cast

from fulgurite.errors import ConfigurationError
from fulgurite.plugins import as_printable

from fulgurite_sharding.distributed import VARIABLE, ProcessGroup
from fulgurite_sharding.profiles import Profile, find_group_profile, read_profile

LAST_LINES = 20
# The exit codes of a program that stopped on request: no failure, so the others may stop as well.
STOP_CODES = (130, 143)
# What a profile launches besides the programs that train. The engine shares an evaluation among
# processes, but these commands are one.
COMMANDS = ("evaluate", "predict")
KILL_DELAY = 5.0
"""Seconds between SIGTERM and SIGKILL."""


def launch(arguments: list[str]) -> int:
    """Run a program as several processes, or with a launch profile.

    A profile also runs `fulgurite evaluate` and `predict`.

    Returns:
        The exit code: 0, or that of the process that failed or stopped first.
    """
    parser = _build_parser()
    options = parser.parse_args(arguments)
    try:
        profile, where = _choose_profile(options)
        if options.program in COMMANDS:
            _check_one_process(profile, where, options)
            return _run_command(profile, where, options)
        if profile.command:
            return _run_command(profile, where, options)
        return _run_here(profile, options)
    except ConfigurationError as error:
        parser.exit(2, f"error: {error}\n")


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "fulgurite launch",
        description=(
            "Run a program as several processes on this machine. They are connected before the"
            " program is imported, and share the GPUs equally, or run on the CPU. SIGINT and"
            " SIGTERM are passed on; when one process fails, the others are ended. A profile may"
            " name another command that starts them, such as srun."
        ),
    )
    parser.add_argument("--processes", type=int, metavar="N", help="how many")
    parser.add_argument(
        "--profile",
        metavar="NAME",
        help="a table below profiles in fulgurite.toml, or below"
        " tool.fulgurite.profiles in pyproject.toml",
    )
    parser.add_argument("--profiles", type=Path, metavar="FILE", help="another TOML file")
    parser.add_argument(
        "--print", action="store_true", help="print the command and its variables, start nothing"
    )
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
    parser.add_argument(
        "program",
        metavar="PROGRAM",
        help="a Python file, or with a profile the command evaluate or predict",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="for PROGRAM")
    return parser


def _choose_profile(options: argparse.Namespace) -> tuple[Profile, str]:
    """Return the profile that was asked for, with the number of processes that was, and where it
    is, in words."""
    profile, where = Profile(), "the command line"
    name = options.profile
    if name is None and options.program in COMMANDS:
        name = find_group_profile(_get_group(options), options.profiles)
    if name is not None:
        profile, where = read_profile(name, options.profiles)
    if options.processes is not None:
        profile = replace(profile, processes=options.processes)
    if options.program not in COMMANDS and not Path(options.program).is_file():
        raise ConfigurationError(f"there is no Python file {options.program}")
    return profile, where


def _get_group(options: argparse.Namespace) -> str:
    """Return the group of evaluators that a command is for, by its arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--group")
    group = parser.parse_known_args(options.arguments)[0].group
    if group is None:
        raise ConfigurationError(f"give --profile NAME, which says where to {options.program}")
    return group


def _check_one_process(profile: Profile, where: str, options: argparse.Namespace) -> None:
    """Raise a `ConfigurationError` if a profile is for several processes."""
    for name in ("processes", "nodes"):
        count = getattr(profile, name)
        if count not in (None, 1):
            raise ConfigurationError(
                f"{where}: {name} is {count}, and fulgurite {options.program} is one process: give "
                "a profile for one"
            )


def _run_here(profile: Profile, options: argparse.Namespace) -> int:
    """Start the processes on this machine and wait for them; return the exit code."""
    count = profile.processes
    if count is None:
        raise ConfigurationError("give --processes N, or a profile with processes or a command")
    if count < 1 or options.timeout < 1 or options.heartbeat < 1:
        raise ConfigurationError("--processes, --timeout and --heartbeat are at least 1")
    device_variables = _get_device_variables(count, profile)
    command = [
        sys.executable,
        "-P",  # nothing is imported from the current directory; the worker adds the program's
        "-m",
        "fulgurite_sharding.worker",
        options.program,
        *options.arguments,
    ]
    if options.print:
        for variables in device_variables:
            print(as_printable(_format_command({**profile.environment, **variables}, command)))
        return 0
    if options.logs:
        _make_folder(options.logs)
    with _reserve_port() as port, _collect_signals() as received, ExitStack() as stack:
        processes: list[_Process] = []
        ended = SimpleQueue[_Process]()
        for number in range(count):
            group = ProcessGroup(
                f"127.0.0.1:{port}", count, number, options.timeout, options.heartbeat
            )
            environment = {
                **os.environ,
                **profile.environment,
                **device_variables[number],
                VARIABLE: str(group),
                "PYTHONUNBUFFERED": "1",
            }
            log = options.logs / f"process-{number}.log" if options.logs else None
            process = _Process(number, count, command, environment, log, ended)
            processes.append(process)
            stack.callback(process.kill)
        return _watch(processes, ended, received)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"--logs {path} is not a folder that can be written to: {error}"
        ) from error


def _run_command(profile: Profile, where: str, options: argparse.Namespace) -> int:
    """Become the command of a profile, which starts the processes; those that train find each other
    by `FULGURITE_DISTRIBUTED`, `auto` unless the profile or the environment says something else."""
    words = profile.fill_command(where)
    variables = dict(profile.environment)
    if options.program in COMMANDS:
        command = [options.program, *options.arguments]
    else:
        command = ["fit", options.program, *options.arguments]
        variables = {VARIABLE: os.environ.get(VARIABLE, "auto"), **variables}
    if words:
        command = [*words, "fulgurite", *command]
    else:
        command = [sys.executable, "-P", "-m", "fulgurite_cli", *command]
        variables |= _get_device_variables(1, profile)[0]
    if options.print:
        print(as_printable(_format_command(variables, command)))
        return 0
    if shutil.which(command[0]) is None:
        raise ConfigurationError(f"{where}: there is no program {command[0]!r} on this machine")
    if options.profile is None and options.profiles is None:
        # Nobody named it: it was found in the current directory, and says what to start.
        started = _format_command(variables, command)
        line = f"{where} is for this group. It starts: {started}"
        print(as_printable(line), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(command[0], command, {**os.environ, **variables})


def _format_command(variables: Mapping[str, str], command: Sequence[str]) -> str:
    """Return a command as it can be pasted into a shell."""
    assignments = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " ".join([*assignments, shlex.join(command)])


class _Process:
    """One of the processes. What it prints is passed on, behind its number unless it is process 0.

    Args:
        number: which process it is, from 0.
        count: the number of processes.
        command: what it runs.
        environment: its environment variables.
        log: a file that its output goes to as well, or None.
        ended: receives the process when it has ended.
    """

    def __init__(
        self,
        number: int,
        count: int,
        command: list[str],
        environment: dict[str, str],
        log: Path | None,
        ended: "SimpleQueue[_Process]",
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
            start_new_session=True,
        )
        self._prefix = f"[{number}] " if number else ""
        self._log = log.open("w", encoding="utf-8") if log else None
        pipes = cast("tuple[IO[bytes], ...]", (self.process.stdout, self.process.stderr))
        streams = zip(
            # A progress bar ends its lines with a carriage return, and shall do so here, too.
            [io.TextIOWrapper(pipe, errors="replace", newline="") for pipe in pipes],
            (sys.stdout, sys.stderr),
            self._tails,
            strict=True,
        )
        self._readers = [
            threading.Thread(target=self._pass_on, args=stream, daemon=True) for stream in streams
        ]
        waiter = threading.Thread(target=self._wait, args=(ended,), daemon=True)
        for thread in (*self._readers, waiter):
            thread.start()

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it and all that it started, and wait for that and for its last lines."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for reader in self._readers:
            # Not forever: what it has started may still hold the pipes.
            reader.join(timeout=1.0)
        if self._log:
            self._log.close()
            self._log = None

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with another exit code than 0 and those of a stop on request."""
        return self.process.returncode not in (None, 0, *STOP_CODES)

    @property
    def tail(self) -> list[str]:
        """Its last lines; those of standard error come last."""
        return [line for tail in self._tails for line in tail][-LAST_LINES:]

    def _wait(self, ended: "SimpleQueue[_Process]") -> None:
        self.process.wait()
        ended.put(self)

    def _pass_on(self, source: IO[str], target: IO[str], tail: deque[str]) -> None:
        """Copy each line of a stream to a stream of ours, to the log and to the last lines."""
        outputs: list[tuple[IO[str], str]] = [(target, self._prefix)]
        if self._log:
            outputs.append((self._log, ""))
        for line in source:
            # What the next line overwrites is not among the last ones.
            if not line.endswith("\r"):
                tail.append(line)
            for output in tuple(outputs):
                stream, prefix = output
                try:
                    stream.write(_as_encodable(prefix + line, stream))
                    stream.flush()
                except OSError as error:
                    # A closed pipe or a full disk. Go on reading: the process would else wait for
                    # ever when its pipe is full.
                    outputs.remove(output)
                    self._report_lost_output(stream, error)

    def _report_lost_output(self, stream: IO[str], error: OSError) -> None:
        what = "its log" if stream is self._log else "what it prints"
        message = f"{self.name}: {what} can no longer be passed on: {error}"
        with suppress(OSError):
            print(message, file=sys.stderr, flush=True)


def _as_encodable(text: str, stream: IO[str]) -> str:
    """Return a text with escapes for the characters that a stream cannot write."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _watch(
    processes: list[_Process], arriving: "SimpleQueue[_Process]", received: list[int]
) -> int:
    """Wait for all processes to end, and return the exit code.

    Signals are passed on; when one process fails, the others are ended.

    Args:
        processes: all of them.
        arriving: gives each process when it has ended.
        received: the signals that this process has received; it grows.
    """
    running = list(processes)
    ended: list[_Process] = []
    num_passed_on = 0
    deadline = float("inf")
    while running:
        # In their order: what one failed of often makes the others fail a few milliseconds later.
        with suppress(Empty):
            process = arriving.get(timeout=0.05)
            running.remove(process)
            ended.append(process)
            if process.has_failed and deadline == float("inf"):
                deadline = time.monotonic() + KILL_DELAY
                for other in running:
                    other.signal(signal.SIGTERM)
        for number in received[num_passed_on:]:
            num_passed_on += 1
            for process in running:
                process.signal(number)
            # The second signal means that they need not end in order.
            if num_passed_on > 1:
                deadline = min(deadline, time.monotonic() + KILL_DELAY)
        if time.monotonic() > deadline:
            for process in running:
                process.kill()
    for process in processes:
        # It has ended; this waits for its last lines.
        process.kill()
    return _report(ended)


def _report(ended: list[_Process]) -> int:
    """Say what failed first, if anything did, and return the exit code."""
    failed = [process for process in ended if process.has_failed]
    unsuccessful = failed or [process for process in ended if process.process.returncode]
    if not unsuccessful:
        return 0
    first = unsuccessful[0]
    code = first.process.returncode
    if failed:
        ending = f"ended with exit code {code}"
        if code < 0:
            ending = f"was ended by {signal.Signals(-code).name}"
        print(f"{first.name} {ending}. Its last lines:", file=sys.stderr)
        print("".join(f"    {line}" for line in first.tail), end="", file=sys.stderr)
    return 128 - code if code < 0 else code


@contextmanager
def _reserve_port() -> Iterator[int]:
    """Hold a free port on loopback, which nobody else gets; JAX's coordinator, which shares ports,
    can bind it as well."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


@contextmanager
def _collect_signals() -> Iterator[list[int]]:
    """Give a list to which SIGINT and SIGTERM are added as they come."""
    received: list[int] = []
    former_handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.signal(number, lambda received_number, _: received.append(received_number))
        former_handlers[number] = handler
    try:
        yield received
    finally:
        for number, handler in former_handlers.items():
            signal.signal(number, handler)


def _get_device_variables(processes: int, profile: Profile) -> list[dict[str, str]]:
    """Return the environment variables that give each process an equal part of the GPUs, or on a
    machine without GPUs that many simulated devices.

    Args:
        processes: how many.
        profile: says how many devices each must get, if it does, and by its environment which GPUs
            there are.
    """
    devices = profile.devices
    environment = {**os.environ, **profile.environment}
    platform = environment.get("JAX_PLATFORMS", "").partition(",")[0]
    gpus = _list_gpus(environment) if platform in ("", "cuda", "gpu") else []
    if not gpus:
        variables = {} if devices is None else {"JAX_NUM_CPU_DEVICES": str(devices)}
        return [variables] * processes
    share, rest = divmod(len(gpus), processes)
    if rest:
        raise ConfigurationError(
            f"{processes} processes cannot have an equal part of {len(gpus)} GPUs: change"
            " --processes or CUDA_VISIBLE_DEVICES, or set JAX_PLATFORMS=cpu"
        )
    if devices not in (None, share):
        raise ConfigurationError(
            f"{processes} processes of {devices} devices need {processes * devices} GPUs; there "
            f"are {len(gpus)}"
        )
    parts = [gpus[number * share : (number + 1) * share] for number in range(processes)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts]


def _list_gpus(environment: Mapping[str, str]) -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in environment:
        return [gpu for gpu in environment["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    if not shutil.which("nvidia-smi"):
        return []
    listing = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    lines = listing.stdout.splitlines()
    return [str(number) for number, line in enumerate(lines) if line.startswith("GPU")]
