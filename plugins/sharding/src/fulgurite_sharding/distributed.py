"""Connecting several processes by `jax.distributed`, before anything touches a device.

Whatever uses names of JAX that are not public is in this file.
"""

import ipaddress
import os
import sys
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import jax
from fulgurite.errors import ConfigurationError, ProcessError
from jax._src import distributed as _distributed, xla_bridge as _xla_bridge

from fulgurite_sharding.peers import register_process

VARIABLE = "FULGURITE_DISTRIBUTED"
# Seconds that JAX waits longer than we do. A process that waited in vain is ended by JAX without an
# exception, so ours must come first.
_EXTRA_TIMEOUT = 3600


@dataclass(frozen=True)
class ProcessGroup:
    """Which processes there are, and which of them this one is.

    Example:
        ProcessGroup("10.0.0.1:4000", processes=2, process=0)

    Attributes:
        coordinator: `HOST:PORT` of process 0. Give it with `processes` and `process`, or none of
            the three: then JAX detects them.
        processes: the number of processes.
        process: which one this is, from 0.
        timeout: seconds to wait for all processes to arrive.
        heartbeat: seconds without a sign of life after which a process counts as dead, and all
            others end.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    timeout: int = 300
    heartbeat: int = 100

    def __post_init__(self) -> None:
        names = ("coordinator", "processes", "process")
        missing = [name for name in names if getattr(self, name) is None]
        if missing and len(missing) < len(names):
            raise ConfigurationError(
                f"distributed: {' and '.join(missing)} missing. Give coordinator, processes and "
                "process, or none of them where JAX can ask SLURM, MPI or Kubernetes"
            )
        host, _, port = (self.coordinator or "HOST:1").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ConfigurationError(
                f"distributed: coordinator is {self.coordinator!r}; write HOST:PORT of process 0"
            )
        if self.processes is not None and not 0 <= (self.process or 0) < self.processes:
            raise ConfigurationError(
                f"distributed: there is no process {self.process} of {self.processes}; they count "
                "from 0"
            )
        if self.timeout < 1 or self.heartbeat < 1:
            raise ConfigurationError("distributed: timeout and heartbeat are seconds, at least 1")

    @classmethod
    def parse(cls, text: str, timeout: int = 300, heartbeat: int = 100) -> "ProcessGroup":
        """Return the group that a value of FULGURITE_DISTRIBUTED describes.

        Args:
            text: `auto`, or `HOST:PORT PROCESS/PROCESSES`, perhaps followed by `timeout=SECONDS`
                and `heartbeat=SECONDS`.
            timeout: of the group, unless the text says it.
            heartbeat: likewise.

        Raises:
            ConfigurationError: it is neither.
        """
        words = [word for word in text.split() if "=" not in word]
        options = dict(word.split("=", 1) for word in text.split() if "=" in word)
        try:
            timeout = int(options.pop("timeout", timeout))
            heartbeat = int(options.pop("heartbeat", heartbeat))
            if options:
                raise ValueError(f"unknown {', '.join(options)}")
            if words == ["auto"]:
                return cls(timeout=timeout, heartbeat=heartbeat)
            coordinator, numbers = words
            process, processes = map(int, numbers.split("/"))
        except ValueError as error:
            raise ConfigurationError(
                f"{VARIABLE} is {text!r} ({error}); write `auto`, or `HOST:PORT "
                "PROCESS/PROCESSES`, such as `10.0.0.1:4000 0/2 timeout=300 heartbeat=100`"
            ) from None
        return cls(coordinator, processes, process, timeout, heartbeat)

    def __str__(self) -> str:
        members = "auto"
        if self.coordinator is not None:
            members = f"{self.coordinator} {self.process}/{self.processes}"
        return f"{members} timeout={self.timeout} heartbeat={self.heartbeat}"


def initialize_distributed(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout: int = 300,
    heartbeat: int = 100,
) -> None:
    """Connect this process with the others: `jax.devices()` are then the devices of all of them.

    Call it before anything touches a device. Where no argument says which processes there are, it
    reads the variable FULGURITE_DISTRIBUTED, whose `timeout=` and `heartbeat=` take precedence, and
    without that JAX detects SLURM, Open MPI, Kubernetes and cloud TPUs. `fulgurite launch` calls
    it, and so do `fulgurite fit` and `fulgurite_cli.run` where that variable is set; a second call
    does nothing.

    After it, an exception that nobody catches ends the process at once, without the functions that
    `atexit` registered: JAX would wait there for the other processes, which wait for this one.

    Args:
        coordinator: `HOST:PORT` of process 0. Give it with `processes` and `process`, or none of
            the three.
        processes: the number of processes.
        process: which one this is, from 0.
        timeout: seconds to wait for all processes to arrive.
        heartbeat: seconds without a sign of life after which a process counts as dead, and all
            others end.

    Raises:
        ConfigurationError: jax is in use already, or nothing says which processes there are.
        ProcessError: not all processes arrived within `timeout` seconds.
    """
    has_arguments = any(value is not None for value in (coordinator, processes, process))
    if not has_arguments and os.environ.get(VARIABLE):
        group = ProcessGroup.parse(os.environ[VARIABLE], timeout, heartbeat)
    else:
        group = ProcessGroup(coordinator, processes, process, timeout, heartbeat)
    if jax.distributed.is_initialized():
        return
    if _xla_bridge.backends_are_initialized():
        raise ConfigurationError(
            "jax is in use already, so this process can no longer join others: call "
            "initialize_distributed() before anything that touches a device, at import too "
            "(jax.devices(), jnp.zeros(...)). `fulgurite launch PROGRAM`, and `fulgurite fit "
            f"PROGRAM` with {VARIABLE}, connect before the program is imported"
        )
    _connect(group)
    register_process(get_client())
    sys.excepthook = _make_exit_hook(sys.excepthook)


def is_connected() -> bool:
    """Return whether this process is connected with others."""
    return jax.distributed.is_initialized()


def get_client() -> Any:
    """Return the client of the coordination service: a store of keys and strings, and barriers,
    without a device."""
    return _distributed.global_state.client


def has_reached_sync_point(poll: int) -> bool:
    """Return whether all processes stop at this poll, because one of them received SIGTERM.

    Args:
        poll: the number of the poll; every process asks for the same numbers in order.
    """
    manager = _distributed.global_state.preemption_sync_manager
    return manager is not None and manager.reached_sync_point(poll)


def exit_process(code: int) -> NoReturn:
    """End this process at once: at a regular end JAX would wait for the others, which wait for
    this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _connect(group: ProcessGroup) -> None:
    """Connect, and wait for all processes.

    JAX waits in a thread: it ends the process where it can wait no longer.
    """
    failures: list[BaseException] = []

    def connect() -> None:
        try:
            jax.distributed.initialize(
                group.coordinator,
                group.processes,
                group.process,
                initialization_timeout=group.timeout + _EXTRA_TIMEOUT,
                heartbeat_timeout_seconds=group.heartbeat,
                coordinator_bind_address=_get_bind_address(group.coordinator),
                cluster_detection_method="deactivate" if group.coordinator else None,
            )
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=connect, name="fulgurite-connect", daemon=True)
    thread.start()
    thread.join(group.timeout)
    where = "where JAX detected them"
    who = "this process"
    if group.coordinator:
        where = f"at {group.coordinator}"
        who = f"process {group.process} of {group.processes}"
    if thread.is_alive():
        _abandon_connection()
        raise ProcessError(
            f"{who} waited {group.timeout} s for the others {where}, and not all came. Start all "
            "of them with the same coordinator and number of processes, and look at the output of "
            "those that ended early"
        )
    if failures:
        failure = failures[0]
        _abandon_connection()
        if isinstance(failure, ValueError) and not group.coordinator:
            raise ConfigurationError(
                "JAX detects neither SLURM, Open MPI, Kubernetes nor a cloud TPU here: give "
                f"coordinator, processes and process, set {VARIABLE}, or use `fulgurite launch` on "
                "one machine"
            ) from failure
        raise ProcessError(f"{who} could not join the others {where}: {failure}") from failure


# Client and service of connections that were given up: to delete them would wait for the others.
_ABANDONED: list[Any] = []


def _abandon_connection() -> None:
    """Keep JAX from waiting, at the end of this process, for others that never came."""
    state = _distributed.global_state
    _ABANDONED.append((state.client, state.service))
    state.client = None
    state.service = None


def _get_bind_address(coordinator: str | None) -> str | None:
    """Return the address where a coordinator on loopback listens, and None elsewhere: there JAX
    chooses."""
    host = (coordinator or "").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return coordinator
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        return None
    return coordinator if is_loopback else None


def _make_exit_hook(former: Any) -> Any:
    """Return an exception hook that ends the process, and with it the connection, after the former
    hook has printed."""

    def end(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        former(kind, value, trace)
        exit_process(130 if issubclass(kind, KeyboardInterrupt) else 1)

    return end
