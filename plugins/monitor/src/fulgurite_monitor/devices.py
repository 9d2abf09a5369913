"""Log what host and devices do, sampled by a thread."""

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fulgurite as fg
import jax
from fulgurite.errors import ConfigurationError
from fulgurite.plugins import hide_constructor_frames

from fulgurite_monitor.arguments import check_seconds
from fulgurite_monitor.host import HostSampler
from fulgurite_monitor.nvidia import open_nvidia_sampler

_LARGEST = ("bytes", "errors", "is_throttled")
"""What is logged by its largest value since the last log step; anything else by its mean."""
JOIN_SECONDS = 5.0


@hide_constructor_frames
@dataclass(eq=False)
class DeviceStatistics(fg.Plugin):
    """Log memory and load of the host and of the devices, at each log step, as telemetry.

    A thread samples every `interval` seconds, so that no step waits: means since the last log step
    are logged, and the largest values of what counts bytes or errors. Everywhere there are
    `host/rss_bytes` and `host/cpu_percent` of the process with its children,
    `host/machine_memory_percent` and `host/machine_cpu_percent`. Devices that tell it, which CPUs
    do not, have `device/N/bytes_in_use`, `device/N/peak_bytes_in_use` and `device/N/bytes_limit` of
    JAX's allocator. With nvidia-ml-py (`fulgurite-monitor[nvidia]`) there are also
    `utilization_percent`, `driver_memory_bytes`, `power_watts`, `temperature_celsius`,
    `is_throttled`, `is_power_capped` and `ecc_errors`. Of several processes only the first logs,
    its own devices.

    Example:
        from fulgurite_monitor import DeviceStatistics

        engine = fg.Engine(steps=100, plugins=[DeviceStatistics(interval=0.5)])

    Attributes:
        interval: seconds from one sample to the next.
    """

    plugin_name = "devices"

    interval: float = 1.0
    _sampler = fg.PerFit["_SamplingThread | None"](lambda: None)

    def __post_init__(self) -> None:
        check_seconds(self.interval, "DeviceStatistics: interval")

    @fg.hookimpl
    def register_actions(self, log_trigger: fg.Trigger | None) -> list[fg.ScheduledAction]:
        """Log with the engine."""
        if log_trigger is None:
            raise ConfigurationError(
                "DeviceStatistics logs at log steps, and this engine has none: give log_every=, or "
                "leave it out"
            )
        return [fg.ScheduledAction("log", "log", self.log, stage="act")]

    @fg.hookimpl
    def on_fit_start(self) -> None:
        """Start the thread."""
        if jax.process_index() == 0:
            self._sampler = _SamplingThread(self.interval)

    @fg.hookimpl
    def on_exception(self, run: fg.Run) -> None:
        """End the thread."""
        self._stop(run)

    @fg.hookimpl
    def on_fit_end(self, run: fg.Run) -> None:
        """End the thread."""
        self._stop(run)

    def log(self, run: fg.Run) -> None:
        """Log what was sampled since the last log step, if anything was."""
        if self._sampler is None:
            return
        if self._sampler.error is not None:
            self._stop(run)
            return
        values = self._sampler.take()
        if values:
            run.log_scalars(self.registered_name, values, stream="telemetry")

    def _stop(self, run: fg.Run) -> None:
        """End the thread, and tell why if it had ended by itself.

        Args:
            run: the run.
        """
        sampler, self._sampler = self._sampler, None
        if sampler is None:
            return
        sampler.stop()
        if sampler.error is not None:
            what = "host and devices cannot be sampled"
            run.report_failure(self.registered_name, what, sampler.error)


class _SamplingThread:
    """A thread that samples until it is stopped.

    Attributes:
        error: why it ended by itself, or None.

    Args:
        interval: seconds from one sample to the next.
    """

    def __init__(self, interval: float) -> None:
        self.error: Exception | None = None
        self._interval = interval
        self._samples: dict[str, list[float]] = defaultdict(list)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="fulgurite device statistics", daemon=True
        )
        self._thread.start()

    def take(self) -> dict[str, float]:
        """Return what was sampled since the last call, by name; empty if nothing was."""
        with self._lock:
            samples, self._samples = self._samples, defaultdict(list)
        return {name: _summarize(name, values) for name, values in samples.items()}

    def stop(self) -> None:
        """End the thread. A driver that hangs is left."""
        self._stopped.set()
        self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        try:
            self._sample_until_stopped()
        except Exception as error:
            self.error = error

    def _sample_until_stopped(self) -> None:
        sample_host = HostSampler().sample
        nvidia = open_nvidia_sampler()
        samplers: list[Callable[[], dict[str, float]]] = [sample_host, sample_allocators]
        if nvidia is not None:
            samplers.append(nvidia.sample)
        try:
            is_stopped = False
            while not is_stopped:
                values = {name: value for sample in samplers for name, value in sample().items()}
                with self._lock:
                    for name, value in values.items():
                        self._samples[name].append(value)
                is_stopped = self._stopped.wait(self._interval)
        finally:
            if nvidia is not None:
                nvidia.close()


def sample_allocators() -> dict[str, float]:
    """Return what JAX's allocators tell of the memory of this process's devices, by name; nothing
    of devices that do not tell. It waits for no computation."""
    values: dict[str, float] = {}
    for number, device in enumerate(jax.local_devices()):
        statistics: dict[str, Any] = device.memory_stats() or {}
        for name in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit"):
            if name in statistics:
                values[f"device/{number}/{name}"] = float(statistics[name])
    return values


def _summarize(name: str, values: list[float]) -> float:
    if any(part in name for part in _LARGEST):
        return max(values)
    return sum(values) / len(values)
