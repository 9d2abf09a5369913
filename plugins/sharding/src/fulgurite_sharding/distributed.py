"""Several processes become one program: `jax.distributed`, connected before anything touches a
device.

Everything that JAX offers no public name for is in this file.
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

VARIABLE = "FULGURITE_DISTRIBUTED"
# Seconds that JAX itself waits longer than we do: it ends a process that waited in vain without an
# exception.
_LONGER = 3600


@dataclass(frozen=True)
class Group:
    """Which processes there are, and which of them this one is.

    Attributes:
        coordinator: `HOST:PORT` of process 0; with `processes` and `process`, or none of the three,
            which leaves it to JAX to detect them.
        processes: how many.
        process: which one this is, from 0.
        timeout: seconds to wait for all to arrive.
        heartbeat: seconds without a sign of life after which a process counts as dead, and all
            others end.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    timeout: int = 300
    heartbeat: int = 100

    def __post_init__(self) -> None:
        given = (self.coordinator, self.processes, self.process)
        if None in given and given != (None, None, None):
            missing = [
                name
                for name, one in zip(("coordinator", "processes", "process"), given, strict=True)
                if one is None
            ]
            raise ConfigurationError(
                f"distributed: {' and '.join(missing)} missing. Give coordinator, processes and "
                "process, or none of "
                "them where SLURM, MPI or Kubernetes tells JAX what they are"
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
    def parse(cls, text: str) -> "Group":
        """The group that FULGURITE_DISTRIBUTED describes: `auto`, or `HOST:PORT PROCESS/PROCESSES`,
        perhaps followed by `timeout=SECONDS` and `heartbeat=SECONDS`."""
        place = [word for word in text.split() if "=" not in word]
        options = dict(word.split("=", 1) for word in text.split() if "=" in word)
        try:
            timeout, heartbeat = (
                int(options.pop("timeout", 300)),
                int(options.pop("heartbeat", 100)),
            )
            if options:
                raise ValueError(f"unknown {', '.join(options)}")
            if place == ["auto"]:
                return cls(timeout=timeout, heartbeat=heartbeat)
            coordinator, numbers = place
            process, processes = map(int, numbers.split("/"))
        except ValueError as error:
            raise ConfigurationError(
                f"{VARIABLE} is {text!r} ({error}); write `auto`, or `HOST:PORT "
                "PROCESS/PROCESSES`, such as "
                "`10.0.0.1:4000 0/2 timeout=300 heartbeat=100`"
            ) from None
        return cls(coordinator, processes, process, timeout, heartbeat)

    def __str__(self) -> str:
        place = (
            "auto"
            if self.coordinator is None
            else f"{self.coordinator} {self.process}/{self.processes}"
        )
        return f"{place} timeout={self.timeout} heartbeat={self.heartbeat}"


def initialize_distributed(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout: int = 300,
    heartbeat: int = 100,
) -> None:
    """Connects this process with the others: from then on `jax.devices()` are the devices of all.

    Called before anything touches a device. Without arguments the variable FULGURITE_DISTRIBUTED
    counts, and without it
    what JAX detects: SLURM, Open MPI, Kubernetes, cloud TPUs. `fulgurite launch`, and `fulgurite
    fit` and `fulgurite_cli.run` with that variable, have called it already; a second call
    does nothing.

    From then on an exception that nobody catches ends the process at once, without functions
    registered by `atexit`, because JAX would wait there for the other processes, which wait for
    this one.

    Arguments: see `Group`.

    Raises:
        ConfigurationError: jax is in use already, or nothing says which processes there are.
        ProcessError: not all processes arrived within `timeout` seconds.
    """
    given = (coordinator, processes, process)
    if given == (None, None, None) and os.environ.get(VARIABLE):
        group = Group.parse(os.environ[VARIABLE])
    else:
        group = Group(coordinator, processes, process, timeout, heartbeat)
    if jax.distributed.is_initialized():
        return
    if _xla_bridge.backends_are_initialized():
        raise ConfigurationError(
            "jax is in use already, so this process can no longer join others: call "
            "initialize_distributed() before anything "
            "that touches a device, at import too (jax.devices(), jnp.zeros(...)). `fulgurite "
            "launch PROGRAM`, and "
            f"`fulgurite fit PROGRAM` with {VARIABLE}, connect before the program is imported"
        )
    _connect(group)
    sys.excepthook = _exit_hook(sys.excepthook)


def is_connected() -> bool:
    """Whether this process is connected with others."""
    return jax.distributed.is_initialized()


def client() -> Any:
    """The client of the coordination service: a store of keys and texts, and barriers, without a
    device."""
    return _distributed.global_state.client


def reached_sync_point(poll: int) -> bool:
    """Whether all processes stop at this poll, because one was told to end. All poll the same
    numbers in order."""
    manager = _distributed.global_state.preemption_sync_manager
    return manager is not None and manager.reached_sync_point(poll)


def leave(code: int) -> NoReturn:
    """Ends this process at once: at a regular end JAX would wait for the others, which wait for
    this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _connect(group: Group) -> None:
    """Waits for all processes, in a thread: JAX would end the process where it can wait no
    longer."""
    failed: list[BaseException] = []

    def connect() -> None:
        try:
            jax.distributed.initialize(
                group.coordinator,
                group.processes,
                group.process,
                initialization_timeout=group.timeout + _LONGER,
                heartbeat_timeout_seconds=group.heartbeat,
                coordinator_bind_address=_bind_address(group.coordinator),
                cluster_detection_method="deactivate" if group.coordinator else None,
            )
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=connect, name="fulgurite-connect", daemon=True)
    thread.start()
    thread.join(group.timeout)
    where = f"at {group.coordinator}" if group.coordinator else "where JAX detected them"
    who = f"process {group.process} of {group.processes}" if group.coordinator else "this process"
    if thread.is_alive():
        _forget()
        raise ProcessError(
            f"{who} waited {group.timeout} s for the others {where}, and not all came. Start all "
            "of them, with the "
            "same coordinator and number of processes, and look at the output of those that ended "
            "early"
        )
    if failed:
        _forget()
        if isinstance(failed[0], ValueError) and not group.coordinator:
            raise ConfigurationError(
                "JAX detects neither SLURM, Open MPI, Kubernetes nor a cloud TPU here: give "
                "coordinator, processes and "
                f"process, set {VARIABLE}, or use `fulgurite launch` on one machine"
            ) from failed[0]
        raise ProcessError(f"{who} could not join the others {where}: {failed[0]}") from failed[0]


def _forget() -> None:
    """Keeps JAX from waiting, at the end of this process, for others that never came."""
    state = _distributed.global_state
    _UNFINISHED.append((state.client, state.service))
    state.client = state.service = None


_UNFINISHED: list[Any] = []


def _bind_address(coordinator: str | None) -> str | None:
    """On loopback the coordinator listens there alone; else JAX chooses."""
    host = (coordinator or "").rpartition(":")[0].strip("[]")
    try:
        return (
            coordinator if host == "localhost" or ipaddress.ip_address(host).is_loopback else None
        )
    except ValueError:
        return None


def _exit_hook(former: Any) -> Any:
    """An exception hook that ends the process, and with it the connection, after the former one has
    printed."""

    def end(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        former(kind, value, trace)
        leave(130 if issubclass(kind, KeyboardInterrupt) else 1)

    return end
