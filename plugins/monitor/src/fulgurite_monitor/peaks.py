"""What devices can do at best: the denominator of the model FLOPs utilization."""

from typing import NamedTuple

_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_AMD = "https://www.amd.com/en/products/accelerators/instinct"
_TPU = "https://cloud.google.com/tpu/docs"
_GEFORCE = "NVIDIA's whitepaper of the architecture {}, appendix A, with float32 accumulation"


class Peak(NamedTuple):
    """The peak rate of one device.

    Example:
        from fulgurite_monitor import find_peak

        peak = find_peak("NVIDIA H100 80GB HBM3")
        print(peak.flops, peak.source)

    Attributes:
        flops: a second, of dense products of bfloat16 matrices that are summed in float32; float16
            where a device has no bfloat16. Figures for sparse matrices, twice as large, do not
            count.
        source: where the figure is from.
    """

    flops: float
    source: str


# By `device_kind` of JAX. What JAX calls a device is one core of TPU v2, v3 and 7x, half of a chip.
PEAKS: dict[str, Peak] = {
    "NVIDIA B200": Peak(2.25e15, f"{_NVIDIA}/dgx-b200/"),
    "NVIDIA GB200": Peak(2.5e15, f"{_NVIDIA}/gb200-nvl72/"),
    "NVIDIA GH200 480GB": Peak(9.895e14, f"{_NVIDIA}/grace-hopper-superchip/"),
    "NVIDIA H200": Peak(9.895e14, f"{_NVIDIA}/h200/"),
    "NVIDIA H200 NVL": Peak(8.355e14, f"{_NVIDIA}/h200/"),
    "NVIDIA H100 80GB HBM3": Peak(9.895e14, f"{_NVIDIA}/h100/"),
    "NVIDIA H100 NVL": Peak(8.355e14, f"{_NVIDIA}/h100/"),
    "NVIDIA H100 PCIe": Peak(7.56e14, f"{_NVIDIA}/h100/"),
    "NVIDIA A100-SXM4-40GB": Peak(3.12e14, f"{_NVIDIA}/a100/"),
    "NVIDIA A100-SXM4-80GB": Peak(3.12e14, f"{_NVIDIA}/a100/"),
    "NVIDIA A100-PCIE-40GB": Peak(3.12e14, f"{_NVIDIA}/a100/"),
    "NVIDIA A100 80GB PCIe": Peak(3.12e14, f"{_NVIDIA}/a100/"),
    "NVIDIA A40": Peak(1.497e14, f"{_NVIDIA}/a40/"),
    "NVIDIA A10": Peak(1.25e14, f"{_NVIDIA}/products/a10-gpu/"),
    "NVIDIA L40S": Peak(3.6205e14, f"{_NVIDIA}/l40s/"),
    "NVIDIA L40": Peak(1.8105e14, f"{_NVIDIA}/l40/"),
    "NVIDIA L4": Peak(1.21e14, f"{_NVIDIA}/l4/"),
    "Tesla T4": Peak(6.5e13, f"{_NVIDIA}/tesla-t4/, float16"),
    "Tesla V100-SXM2-16GB": Peak(1.25e14, f"{_NVIDIA}/v100/, float16"),
    "Tesla V100-SXM2-32GB": Peak(1.25e14, f"{_NVIDIA}/v100/, float16"),
    "NVIDIA GeForce RTX 3090": Peak(7.1e13, _GEFORCE.format("Ampere GA102")),
    "NVIDIA GeForce RTX 4090": Peak(1.652e14, _GEFORCE.format("Ada")),
    "NVIDIA GeForce RTX 5090": Peak(2.095e14, _GEFORCE.format("Blackwell RTX")),
    "AMD Instinct MI300X": Peak(1.3074e15, f"{_AMD}/mi300/mi300x.html"),
    "AMD Instinct MI325X": Peak(1.3074e15, f"{_AMD}/mi300/mi325x.html"),
    "TPU v2": Peak(4.5e13 / 2, f"{_TPU}/v2"),
    "TPU v3": Peak(1.23e14 / 2, f"{_TPU}/v3"),
    "TPU v4": Peak(2.75e14, f"{_TPU}/v4"),
    "TPU v5 lite": Peak(1.97e14, f"{_TPU}/v5e"),
    "TPU v5e": Peak(1.97e14, f"{_TPU}/v5e"),
    "TPU v5": Peak(4.59e14, f"{_TPU}/v5p"),
    "TPU v5p": Peak(4.59e14, f"{_TPU}/v5p"),
    "TPU v6 lite": Peak(9.18e14, f"{_TPU}/v6e"),
    "TPU v6e": Peak(9.18e14, f"{_TPU}/v6e"),
    "TPU7x": Peak(2.307e15 / 2, f"{_TPU}/tpu7x"),
}
"""The peaks that are known, each with its source; there is no guess for another device."""


def find_peak(device_kind: str) -> Peak | None:
    """Return the peak of a kind of device; None if it is not known.

    Args:
        device_kind: such as `jax.devices()[0].device_kind`.
    """
    return PEAKS.get(device_kind)
