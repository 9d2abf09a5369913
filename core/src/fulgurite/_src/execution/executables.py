"""Executables that the engines of a process share.

XLA takes most of the time until the first step. A second engine of the same program, as in a sweep
or a notebook, is traced again, because what a function does may depend on anything; it is compiled
only if its text differs from that of the programs before.
"""

from collections import OrderedDict
from hashlib import sha256
from typing import Any

import jax
from jax.core import Tracer
from jax.experimental.compilation_cache import compilation_cache

from fulgurite.errors import ConfigurationError

MAX_EXECUTABLES = 32
"""How many are kept; the one that was not used for longest goes first."""

# XLA's default scheduler on CPU wakes another thread for every few kernels that are ready at once.
# That costs a step with a small state more than it gains: 0.88 against 0.79 of a hand-written one.
# Large ones and convolutions gain.
_SMALL_STATE_BYTES = 2**20
_SMALL_STEP_OPTIONS: dict[str, Any] = {
    "cpu": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
}

_executables: OrderedDict[Any, jax.stages.Compiled] = OrderedDict()


def keep_compiled_programs(directory: str) -> None:
    """Have JAX keep all that it compiles from now on in a directory, for the next process.

    Raises:
        ConfigurationError: the path has `~` or `$`, which only a shell expands.
    """
    if directory.startswith("~") or "$" in directory:
        raise ConfigurationError(
            f"Engine: compilation_cache_dir is {directory!r}, and neither ~ nor variables are "
            "expanded there: give os.path.expandvars(os.path.expanduser(...))"
        )
    jax.config.update("jax_compilation_cache_dir", directory)
    # JAX leaves out what compiles within a second, which most programs of a small model do.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # If something was compiled before, JAX remembers that there is no directory.
    compilation_cache.reset_cache()


def choose_compiler_options(lowered: Any, arrays: list[Any]) -> dict[str, Any] | None:
    """Return options for a step on a small state without convolutions; None for the default.

    Args:
        lowered: the step.
        arrays: of its state.
    """
    if sum(array.nbytes for array in arrays) >= _SMALL_STATE_BYTES:
        return None
    if "stablehlo.convolution" in lowered.as_text():
        return None
    return _SMALL_STEP_OPTIONS.get(jax.default_backend())


def compile_lowered(
    lowered: jax.stages.Lowered, arguments: Any, options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """Return the executable of a lowered program, the same one for the same text.

    Args:
        lowered: the program.
        arguments: those it was lowered for; an executable stays on their devices.
        options: for XLA.
    """
    text = lowered.as_text()
    # Arrays that a function holds may be no part of the text, and neither are the functions that a
    # program calls on the host.
    is_whole = not getattr(jax.config, "jax_use_simplified_jaxpr_constants", False)
    used_arguments = _find_used_arguments(lowered)
    if not is_whole or "callback" in text or used_arguments is None:
        return lowered.compile(options)
    key = (
        sha256(text.encode()).digest(),
        # Arguments that are not used are not part of the text either, nor does it say which of
        # several alike are used.
        str(lowered.in_avals),
        used_arguments,
        lowered.in_tree,
        lowered.out_tree,
        tuple(sorted((options or {}).items())),
        jax.config.jax_default_device,  # pyright: ignore[reportAttributeAccessIssue]
        _find_devices(arguments),
    )
    executable = _executables.get(key)
    if executable is None:
        executable = lowered.compile(options)
        _executables[key] = executable
        if len(_executables) > MAX_EXECUTABLES:
            _executables.popitem(last=False)
    _executables.move_to_end(key)
    return executable


def _find_used_arguments(lowered: jax.stages.Lowered) -> tuple[int, ...] | None:
    """Return the indices of the arguments that a program uses; None if JAX does not tell.

    There is no public name for them: jax 0.10 and 0.12 have them here.
    """
    details = getattr(lowered._lowering, "compile_args", None) or {}
    indices = details.get("kept_var_idx")
    return None if indices is None else tuple(sorted(indices))


def _find_devices(arguments: Any) -> frozenset[Any]:
    """Return the devices on which the arrays of a tree lie."""
    devices: set[Any] = set()
    for leaf in jax.tree.leaves(arguments):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            devices |= leaf.sharding.device_set
    return frozenset(devices)
