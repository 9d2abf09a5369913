"""JAX's own settings, where an engine has to do something for them to work."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fulgurite.errors import ConfigurationError

# Those that a program may set around one fit or evaluation and not another.
_TRACE_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)


def read_trace_settings() -> tuple[Any, ...]:
    """Return the settings by which JAX traces: a program that was traced by others is another."""
    return tuple(getattr(jax.config, name) for name in _TRACE_SETTINGS)


def is_debugging_numbers() -> bool:
    """Return whether `jax_debug_nans` or `jax_debug_infs` asks for the operation that makes one."""
    return _is_set("jax_debug_nans") or _is_set("jax_debug_infs")


def has_invalid_numbers(arrays: Any) -> bool:
    """Return whether a NaN or an infinity that JAX is asked to find is among arrays.

    JAX itself looks neither at numbers that are packed nor at the results of a program that was
    compiled ahead of its call.

    Args:
        arrays: a tree of them; it is waited for.
    """
    for leaf in jax.tree.leaves(jax.device_get(arrays)):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        if _is_set("jax_debug_nans") and np.isnan(leaf).any():
            return True
        if _is_set("jax_debug_infs") and np.isinf(leaf).any():
            return True
    return False


def is_jit_disabled() -> bool:
    """Return whether `jax_disable_jit` asks to run operation by operation."""
    return _is_set("jax_disable_jit")


def check_jit_can_compile() -> None:
    """Raise an error where Equinox has put a function without `trace` and `lower` in the place of
    `jax.jit`."""
    if not hasattr(jax.jit(abs), "lower"):
        raise ConfigurationError(
            "EQX_ON_ERROR=breakpoint is set: Equinox then replaces jax.jit by a function with "
            "which an engine cannot compile. Unset it, and look into the step with "
            "jax.debug.breakpoint"
        )


def check_jit_enabled() -> None:
    """Raise an error where a training program can be neither compiled nor run."""
    check_jit_can_compile()
    if is_jit_disabled():
        raise ConfigurationError(
            "jax_disable_jit is set, but training is one compiled program: unset it, and look into "
            "the step with jax.debug.breakpoint or print"
        )


def _is_set(option: str) -> bool:
    return bool(getattr(jax.config, option, False))
