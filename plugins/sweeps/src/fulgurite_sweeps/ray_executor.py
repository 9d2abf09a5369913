"""Trials on a cluster of Ray: an existing one, or one that is started here and ended with the
sweep. Ray is imported when the cluster is needed."""

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fulgurite.errors import ConfigurationError

from fulgurite_sweeps.executors import (
    LOST,
    MEMORY,
    USABLE,
    Executor,
    Job,
    find_devices,
    is_in_use,
)
from fulgurite_sweeps.ray_runner import TrialRunner

LOOPBACK = "127.0.0.1"
PASSED_ON = ("FULGURITE_", "JAX_", "XLA_")
"""The beginnings of variables of the driver that its trials have on every machine: with others, a
program might compute other bits."""
LONGEST_FOLDER = 107 - len("/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store")
"""How many bytes the path of Ray's folder may have: the kernel takes 107 for that of a socket."""
_SMALLEST = 0.0001
"""The smallest part of a resource that Ray counts."""
_OBJECT_STORE = 80 * 2**20
"""Bytes of shared memory, the least that Ray takes: trials leave their results on disk."""
# A trial saves when its runner is gone; Ray would kill it first.
_RUNTIME = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "false"}}


class RayExecutor(Executor):
    """Runs trials on the machines of a Ray cluster, all of which must see the directory of the
    sweep and have the same packages.

    A trial of a machine that is lost is resumed on another one.

    Example:
        from fulgurite_sweeps import RayExecutor

        executor = RayExecutor(slots=2)  # on this machine, without a cluster
        on_cluster = RayExecutor("10.0.0.1:6379", cpus=4, gpus=1)

    Args:
        address: of the head of a cluster, `HOST:PORT`, or `auto` for the one of this machine; None
            to start one here. It is not used where the program has called `ray.init` itself.
        cpus: how many each trial has, as Ray counts them.
        gpus: how many each trial has, perhaps 0.5; None for one where the cluster has any.
        slots: how many trials run at a time; None for as many as the cluster has room for.
        resources: what else each trial needs of what Ray's nodes offer, by name.

    Raises:
        ConfigurationError: a number is negative, or the address has another form.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        cpus: float = 1,
        gpus: float | None = None,
        slots: int | None = None,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        if address is not None and "//" in address:
            raise ConfigurationError(
                f"ray:{address} is not HOST:PORT: start the sweep on a machine of the cluster, and "
                "give the address of its head, or auto"
            )
        is_count = slots is None or (type(slots) is int and slots > 0)
        if cpus < 0 or (gpus or 0) < 0 or not is_count:
            raise ConfigurationError(
                f"ray: cpus={cpus} and gpus={gpus} are what a trial needs, and slots={slots} how "
                "many run at a time: give positive numbers"
            )
        for name, value in {"cpus": cpus, "gpus": gpus or 0, **(resources or {})}.items():
            if 0 < value < _SMALLEST:
                raise ConfigurationError(
                    f"ray: {name}={value} is less than Ray can count, which is {_SMALLEST}: give "
                    "that or more, or 0"
                )
        self.num_slots = 0
        self._address = address
        self._cpus = cpus
        self._gpus = gpus
        self._slots = slots
        self._resources = dict(resources or {})

    @contextmanager
    def open(self, folder: Path, tell: Callable[[str], None]) -> Iterator[None]:
        """Connect to the cluster, or start one, for the time of the block.

        Args:
            folder: of the sweep, in which Ray keeps its files if the cluster is started here.
            tell: gets what the user should know.

        Raises:
            ConfigurationError: there is no such cluster, or none of its machines has what a trial
                needs.
        """
        ray = _import_ray(is_local=self._address is None)
        with self._connect(ray, folder, tell):
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            if self._gpus is None:
                self._gpus = min(1, sum(node.get("GPU", 0) for node in nodes))
            needs = {"CPU": self._cpus, "GPU": self._gpus, **self._resources}
            if not any(needs.values()):
                if self._slots is None:
                    raise ConfigurationError(
                        "ray: there is room for any number of trials that need nothing: say how "
                        "many run at a time, as in ray(cpus=0,slots=4)"
                    )
                self.num_slots = self._slots
                yield
                return
            room = sum(count_trials(node, needs) for node in nodes)
            if not room:
                needed = ", ".join(f"{name}: {value:g}" for name, value in needs.items())
                raise ConfigurationError(
                    f"no machine of the cluster has room for a trial, which needs {needed}: ask "
                    "for less, as in ray(cpus=1)"
                )
            self.num_slots = self._slots or room
            yield

    @contextmanager
    def _connect(self, ray: Any, folder: Path, tell: Callable[[str], None]) -> Iterator[None]:
        """Be connected to a cluster within the block.

        Args:
            ray: the module.
            folder: of the sweep.
            tell: gets what the user should know.
        """
        if ray.is_initialized():
            yield  # by the program, which ends it
            return
        if self._address is not None:
            with _start_ray(ray, address=self._address):
                yield
            return
        with _make_ray_folder(folder, tell) as ray_folder:
            num_cpus = None if self._slots is None else max(1, round(self._slots * self._cpus))
            local = {
                "address": "local",
                "num_cpus": num_cpus,
                "num_gpus": len(find_devices()),
                "include_dashboard": False,
                "object_store_memory": _OBJECT_STORE,
                "_node_ip_address": LOOPBACK,
                "_temp_dir": str(ray_folder),
            }
            with _start_ray(ray, **local):
                address = ray.util.get_node_ip_address()
                if address != LOOPBACK:
                    tell(f"Ray was imported before the sweep: its cluster listens at {address}")
                yield

    def start(self, job: Job) -> "RayJob":
        """Start a trial on the machine with the most room."""
        ray = _import_ray()
        environment = {
            name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)
        }
        if 0 < (self._gpus or 0) < 1:
            environment.setdefault(MEMORY, f"{USABLE * (self._gpus or 0):.3f}")
        runner_class = ray.remote(TrialRunner).options(
            num_cpus=self._cpus,
            num_gpus=self._gpus,
            resources=self._resources or None,
            scheduling_strategy="SPREAD",
            max_concurrency=2,  # it is stopped while it waits
            runtime_env=_RUNTIME,
        )
        return RayJob(ray, runner_class.remote(), job, {**environment, **job.environment})


class RayJob:
    """A trial that runs somewhere in a cluster.

    Args:
        ray: the module.
        runner: the actor that runs the trial, which may wait for its place.
        job: the trial.
        environment: variables that it has besides those of its machine.
    """

    def __init__(self, ray: Any, runner: Any, job: Job, environment: dict[str, str]) -> None:
        self._ray = ray
        self._runner: Any = runner
        self._job = job
        self._code: int | None = None
        folder, log = os.getcwd(), str(job.log.absolute())
        self._greeting = runner.greet.remote()
        self._end = runner.run.remote(job.command, folder, log, environment)

    def poll(self) -> int | None:
        """Return its exit code once it has ended; `LOST` once its machine is gone and the run may
        be resumed."""
        if self._code is None and self._is_ready(self._end):
            self._code = self._read_code()
            self._runner = None  # it ends, and its place is free
        if self._code == LOST and is_in_use(self._job.run_dir):
            return None  # it saves, or its machine has been silent for less than a minute
        return self._code

    def stop(self, number: int) -> None:
        """Ask it to save and end; one that waits for its place has nothing to save.

        Args:
            number: of the signal that this process received.
        """
        if self._code is not None:
            return
        if self._is_ready(self._greeting):
            self._runner.stop.remote(number)
        else:
            self._ray.kill(self._runner)

    def _is_ready(self, reference: Any) -> bool:
        return bool(self._ray.wait([reference], timeout=0)[0])

    def _read_code(self) -> int:
        try:
            return self._ray.get(self._end)
        except self._ray.exceptions.RayTaskError as error:
            with self._job.log.open("a") as log:
                log.write(f"error: the trial could not be started: {error.cause}\n")
            return 1
        except self._ray.exceptions.RayError:
            return LOST


def count_trials(node: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """Return how many trials have room on a machine.

    Args:
        node: what it offers, by the names of Ray.
        needs: what a trial needs.
    """
    shares = [
        round(node.get(name, 0) / _SMALLEST) // round(value / _SMALLEST)
        for name, value in needs.items()
        if value
    ]
    return min(shares, default=0)


def _import_ray(is_local: bool = False) -> Any:
    """Return the module, which reads these variables when it is imported.

    Args:
        is_local: whether it is for a cluster of this machine alone.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if is_local:
        # Ray takes 127.0.0.1 for a mistake, and listens at the address of the network, unless it
        # believes itself on a system on which it has no clusters of several machines.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "trials on Ray need it: pip install 'fulgurite-sweeps[ray]'"
        ) from error
    return ray


@contextmanager
def _start_ray(ray: Any, **options: Any) -> Iterator[None]:
    """Be connected to Ray within the block.

    Args:
        ray: the module.
        **options: of `ray.init`.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        try:
            ray.init(log_to_driver=False, logging_level="ERROR", **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = options["address"]
            what = "cannot be started here" if where == "local" else f"is not at {where}"
            raise ConfigurationError(f"a cluster of Ray {what}: {error}") from error
        finally:
            if is_main:
                signal.signal(signal.SIGTERM, handler)  # Ray sets its own
        yield
    finally:
        ray.shutdown()


@contextmanager
def _make_ray_folder(folder: Path, tell: Callable[[str], None]) -> Iterator[Path]:
    """Yield where Ray keeps its files: a folder in that of the sweep, unless its path is too long.

    Args:
        folder: of the sweep.
        tell: gets the other folder, which is removed at the end.
    """
    inside = folder / "ray"
    if len(os.fsencode(inside)) <= LONGEST_FOLDER:
        yield inside
        return
    outside = Path(tempfile.mkdtemp(prefix="fg-ray-"))
    tell(f"the path of {inside} is too long for Ray's sockets: its files are in {outside}")
    try:
        yield outside
    finally:
        with suppress(OSError):
            shutil.rmtree(outside)
