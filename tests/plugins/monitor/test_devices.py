"""Statistics of host and devices: sampled beside training, logged at log steps."""

import threading
import types
from typing import Any

import fulgurite as fg
import jax
import psutil
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_monitor import DeviceStatistics, Goodput
from fulgurite_monitor.devices import sample_allocators
from fulgurite_monitor.nvidia import NvidiaSampler
from monitored import Line, Records, make_rows

HOST = {
    "host/rss_bytes",
    "host/cpu_percent",
    "host/machine_memory_percent",
    "host/machine_cpu_percent",
}


def wait_for_sample(run: fg.Run) -> None:
    """An action that comes back once the thread has sampled."""
    statistics = run.engine.plugins.plugins["devices"].plugin
    threading.Event().wait(0.05)
    while not statistics._sampler._samples:
        threading.Event().wait(0.01)


def test_memory_of_the_process_is_logged_at_log_steps_as_telemetry() -> None:
    records = Records("devices")
    wait = fg.LambdaPlugin(every={2: wait_for_sample})
    plugins = [wait, DeviceStatistics(interval=0.01), records]
    engine = fg.Engine(steps=4, log_every=2, autoload=False, plugins=plugins)
    engine.fit(Line, make_rows(64))
    assert [record.step for record in records.records] == [2, 4]
    for record in records.records:
        assert record.stream == "telemetry"
        # A CPU tells nothing of its allocator.
        assert record.values.keys() == HOST
        assert 0.5 < record.values["host/rss_bytes"] / psutil.Process().memory_info().rss < 2
    names = {thread.name for thread in threading.enumerate()}
    assert "fulgurite device statistics" not in names


def test_memory_of_devices_that_tell_it_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = {"bytes_in_use": 10, "peak_bytes_in_use": 30, "bytes_limit": 100, "num_allocs": 7}
    devices = [
        types.SimpleNamespace(memory_stats=lambda: statistics),
        types.SimpleNamespace(memory_stats=lambda: None),
    ]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert sample_allocators() == {
        "device/0/bytes_in_use": 10.0,
        "device/0/peak_bytes_in_use": 30.0,
        "device/0/bytes_limit": 100.0,
    }


class FakeDriver:
    """What `pynvml` has, of two devices; the second tells neither power nor errors."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 1
    # As in nvml.h.
    nvmlClocksThrottleReasonSwPowerCap = 0x4
    nvmlClocksThrottleReasonHwSlowdown = 0x8
    nvmlClocksThrottleReasonSwThermalSlowdown = 0x20
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80

    def __init__(self, reasons: int) -> None:
        self._reasons = reasons

    def nvmlDeviceGetHandleByIndex(self, number: int) -> Any:
        return number

    def nvmlDeviceGetHandleByUUID(self, name: str) -> Any:
        return name

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        return types.SimpleNamespace(gpu=87)

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return types.SimpleNamespace(used=5_000)

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        if handle == "GPU-abc":
            raise self.NVMLError("not supported")
        return 301_500

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        return 61

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        return self._reasons

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: int, counter: int) -> int:
        return 2


def test_what_the_driver_tells_of_each_visible_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-abc")
    driver: Any = FakeDriver(reasons=0x21)  # idle, and too hot
    values = NvidiaSampler(driver, [0, 1]).sample()
    assert values["device/0/power_watts"] == 301.5 and "device/1/power_watts" not in values
    assert values["device/1/utilization_percent"] == 87
    assert values["device/0/is_throttled"] == 1 and values["device/0/ecc_errors"] == 2
    assert values["device/0/is_power_capped"] == 0
    full: Any = FakeDriver(reasons=0x4)  # as much power as it may take
    values = NvidiaSampler(full, [0]).sample()
    assert (values["device/0/is_throttled"], values["device/0/is_power_capped"]) == (0, 1)


def test_sampling_that_fails_is_reported_and_training_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr("fulgurite_monitor.devices.sample_allocators", fail)
    statistics = DeviceStatistics(interval=0.01)

    def wait(run: fg.Run) -> None:
        assert statistics._sampler is not None
        statistics._sampler._thread.join(10)

    plugins = [fg.LambdaPlugin(every={fg.At(2): wait}), statistics]
    engine = fg.Engine(steps=4, log_every=2, autoload=False, plugins=plugins)
    with pytest.warns(UserWarning, match="host and devices cannot be sampled"):
        result = engine.fit(Line, make_rows(64))
    assert result.failures == {"devices": "RuntimeError: the driver is gone"}


@pytest.mark.parametrize("interval", [0, -1.0, float("nan"), float("inf"), 1e300, "1", None])
@pytest.mark.parametrize("monitor", [DeviceStatistics, Goodput])
def test_interval_that_no_thread_can_wait_for_is_an_error(monitor: Any, interval: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{monitor.__name__}: interval is .*; give secon"):
        monitor(interval=interval)
