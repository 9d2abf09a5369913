"""What the driver of NVIDIA's devices tells, by nvidia-ml-py."""

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax


def open_nvidia_sampler() -> "NvidiaSampler | None":
    """Return a sampler of the devices of this process; None where there are none, or where
    nvidia-ml-py is not installed or finds no driver."""
    devices = [device for device in jax.local_devices() if device.platform == "gpu"]
    if not devices:
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return NvidiaSampler(pynvml, [device.local_hardware_id for device in devices])
    except pynvml.NVMLError:
        return None


class NvidiaSampler:
    """Reads utilization, power, temperature, memory, throttling and ECC errors of devices.

    Args:
        pynvml: the module, initialized.
        numbers: of the devices among those that `CUDA_VISIBLE_DEVICES` leaves visible.
    """

    def __init__(self, pynvml: ModuleType, numbers: list[int]) -> None:
        self._pynvml = pynvml
        self._handles = [self._find_handle(number) for number in numbers]

    def sample(self) -> dict[str, float]:
        """Return the values by name, as `device/0/power_watts`; what a device does not tell is left
        out."""
        values = {}
        for number, handle in enumerate(self._handles):
            for name, read in self._list_readers():
                try:
                    values[f"device/{number}/{name}"] = float(read(handle))
                except self._pynvml.NVMLError:
                    continue  # such as ECC of a consumer's card, or what a part of a card hides
        return values

    def close(self) -> None:
        """Release the driver."""
        self._pynvml.nvmlShutdown()

    def _list_readers(self) -> list[tuple[str, Callable[[Any], float]]]:
        nvml = self._pynvml
        uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        slowdown = (
            nvml.nvmlClocksThrottleReasonHwSlowdown
            | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
            | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
            | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
        )
        power_cap = nvml.nvmlClocksThrottleReasonSwPowerCap

        def has_reason(handle: Any, reasons: int) -> float:
            return float(bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & reasons))

        return [
            ("utilization_percent", lambda handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            ("driver_memory_bytes", lambda handle: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            ("power_watts", lambda handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            (
                "temperature_celsius",
                lambda handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            ),
            ("is_throttled", lambda handle: has_reason(handle, slowdown)),
            ("is_power_capped", lambda handle: has_reason(handle, power_cap)),
            (
                "ecc_errors",
                lambda handle: nvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, volatile),
            ),
        ]

    def _find_handle(self, number: int) -> Any:
        """Return the driver's handle of a visible device: `CUDA_VISIBLE_DEVICES` has its number in
        the machine, or its UUID."""
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
        name = visible[number] if number < len(visible) and visible[number] else str(number)
        if name.isdigit():
            return self._pynvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._pynvml.nvmlDeviceGetHandleByUUID(name)
