"""Products of linear layers in float8, in the forward pass."""

import copy
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from fulgurite import Selector
from fulgurite.errors import ConfigurationError
from jaxtyping import Array, Float, PyTree

DTYPE = jnp.float8_e4m3fn

MULTIPLE = 16
"""Tensor cores multiply float8 matrices whose sizes are multiples of this."""

MIN_CAPABILITY = (8, 9)
"""The compute capability of the first NVIDIA GPUs with float8: Ada and Hopper."""


def check_device(device: Any) -> None:
    """Raise a ConfigurationError for a device without products in float8.

    Args:
        device: a `jax.Device`.
    """
    capability = str(getattr(device, "compute_capability", ""))
    numbers = capability.split(".")
    is_nvidia = device.platform == "gpu" and all(part.isdecimal() for part in numbers)
    if not is_nvidia or tuple(map(int, numbers)) < MIN_CAPABILITY:
        kind = (
            f"{device.device_kind} with compute capability {capability}" if capability else device
        )
        raise ConfigurationError(
            f"Precision('fp8'): {kind} has no products in float8, which need an NVIDIA GPU of "
            "compute capability 8.9 or above, such as an H100: use Precision('bf16')"
        )


def cast_products(module: PyTree, exclude: Selector | None) -> PyTree:
    """Return a module whose `eqx.nn.Linear` layers multiply in float8.

    Those that are excluded, or of which a size is not a multiple of 16, stay as they are.

    Args:
        module: the module.
        exclude: what is left as it is.
    """
    flags = jax.tree.map(lambda _: False, module) if exclude is None else exclude(module)

    def cast(node: Any, flag: PyTree) -> Any:
        if not _is_linear(node) or any(jax.tree.leaves(flag)):
            return node
        if any(size % MULTIPLE for size in node.weight.shape):
            return node
        layer = copy.copy(node)
        object.__setattr__(layer, "__class__", Float8Linear)
        return layer

    return jax.tree.map(cast, module, flags, is_leaf=_is_linear)


def _is_linear(node: Any) -> bool:
    return type(node) is eqx.nn.Linear


class Float8Linear(eqx.nn.Linear):
    """A linear layer whose products are in float8."""

    def __call__(self, x: Any, *, key: Any = None) -> Any:
        y = multiply(self.weight, x)
        return y if self.bias is None else y + self.bias


@jax.custom_jvp
def multiply(weight: Float[Array, "out in"], x: Float[Array, " in"]) -> Float[Array, " out"]:
    """Return the product of a weight and an input, multiplied in float8 and added up in float32.

    The input and each row of the weight have a scale of their own, by which their largest number
    becomes the largest of the dtype. So no example changes the result of another. Derivatives are
    those of the product without rounding, in the dtypes of the arguments: float8 in the backward
    pass as well would need the gradients of a whole batch at once.

    Source: Micikevicius et al. 2022, arXiv:2209.05433 (the dtype).

    Args:
        weight: the weight.
        x: the input of one example.
    """
    weight_quantized, weight_scale = quantize(weight)
    quantized, scale = quantize(x)
    product = jnp.dot(weight_quantized, quantized, preferred_element_type=jnp.float32)
    return (product * weight_scale * scale).astype(x.dtype)


@multiply.defjvp
def _differentiate(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    weight, x = primals
    weight_tangent, x_tangent = tangents
    tangent = weight_tangent @ x + weight @ x_tangent
    return multiply(weight, x), tangent.astype(x.dtype)


def quantize(array: Float[Array, "*rows columns"]) -> tuple[Array, Float[Array, "*rows"]]:
    """Return an array in float8, and by what to multiply each row of it, float32."""
    array = array.astype(jnp.float32)
    largest = jnp.max(jnp.abs(array), axis=-1)
    scale = jnp.where(largest > 0, largest / float(jnp.finfo(DTYPE).max), 1)
    return (array / scale[..., None]).astype(DTYPE), scale
