"""The jitted program of a validation step, without modules at its borders."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fulgurite._src.execution.debugging import has_invalid_numbers, is_debugging_numbers
from fulgurite._src.execution.flat_state import VectorPacking
from fulgurite._src.metrics.columns import find_columns
from fulgurite._src.tree.specs import is_real_dtype, shape_spec


class CarryLayout:
    """How what one batch of an evaluation hands to the next crosses `jax.jit`: single numbers in
    few vectors, then the arrays.

    A small perceptron has eight numbers in loss and accuracy. As arguments and results of their own
    they took 20 of the 170 µs of a batch.

    Attributes:
        spec: the tree, with shapes and dtypes.

    Args:
        carry: the tree, traced or on a device.
    """

    def __init__(self, carry: Any) -> None:
        self.spec = shape_spec(carry)
        specs, self._treedef = jax.tree.flatten(self.spec)
        self._are_packed = [leaf.shape == () and is_real_dtype(leaf.dtype) for leaf in specs]
        indices = [index for index, is_packed in enumerate(self._are_packed) if is_packed]
        positions = {index: position for position, index in enumerate(indices)}
        columns = [[positions[index] for index in column] for column in find_columns(self.spec)]
        self._packing = VectorPacking([specs[index] for index in indices], columns=columns)

    def flatten(self, carry: Any) -> list[Any]:
        """Return the arrays of a tree; traced."""
        leaves = list(zip(jax.tree.leaves(carry), self._are_packed, strict=True))
        numbers = [leaf for leaf, is_packed in leaves if is_packed]
        arrays = [leaf for leaf, is_packed in leaves if not is_packed]
        return [*arrays, *self._packing.pack(numbers)]

    def unflatten(self, flat: list[Any]) -> Any:
        """Return the tree of these arrays, on the device or on the host."""
        num_arrays = self._are_packed.count(False)
        arrays = iter(flat[:num_arrays])
        numbers = iter(self._packing.unpack(flat[num_arrays:]))
        leaves = [next(numbers) if is_packed else next(arrays) for is_packed in self._are_packed]
        return self._treedef.unflatten(leaves)


class EvaluationProgram:
    """A jitted validation step whose results leave it as lists of arrays.

    To flatten metrics in Python, twice for each batch, took longer than a batch of a small
    perceptron.

    Attributes:
        carry_layout: of what one batch hands to the next, once it was traced; set by hand where a
            batch of another structure came before.
        carry_zeros: what the first batch of each pass is handed, once there was one.
        collected_treedef: that of the collecting metrics.
        media_treedef: that of the media.

    Args:
        function: `function(leaves, batch, device_arrays, index, carry)` returns the new carry, the
            collecting metrics and the media, as trees; its carry is None at first.
        sharding: where the results lie; None for anywhere.
    """

    carry_layout: CarryLayout | None = None
    carry_zeros: list[Any] | None = None
    collected_treedef: Any
    media_treedef: Any

    def __init__(self, function: Callable[..., Any], sharding: Any) -> None:
        self._function = function
        self._run = jax.jit(self._call_flat, out_shardings=sharding)
        self.trace = self._run.trace

    def __call__(self, *arguments: Any) -> tuple[list[Any], list[Any], list[Any]]:
        results = self._run(*arguments)
        if is_debugging_numbers():
            assert self.carry_layout is not None
            carry = self.carry_layout.unflatten(jax.device_get(results[0]))
            if has_invalid_numbers(carry):
                # Operation by operation, so that JAX raises its error at the line of the user.
                self._call_flat(*arguments)
        return results

    def _call_flat(self, *arguments: Any) -> tuple[list[Any], list[Any], list[Any]]:
        *others, carry = arguments
        if carry is not None:
            assert self.carry_layout is not None
            carry = self.carry_layout.unflatten(carry)
        carry, collected, media = self._function(*others, carry)
        carry = jax.tree.map(jnp.asarray, carry)
        self.carry_layout = CarryLayout(carry)
        collected_leaves, self.collected_treedef = jax.tree.flatten(collected)
        media_leaves, self.media_treedef = jax.tree.flatten(media)
        return self.carry_layout.flatten(carry), collected_leaves, media_leaves
