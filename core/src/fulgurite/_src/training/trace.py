"""Functions of trees that are traced once for each kind of arguments."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from fulgurite._src.tree.specs import is_array, leaf_signature


class CachedTrace:
    """A traced function that is traced once for each structure, shapes and static leaves.

    Any later call, in whatever trace, uses the program of the first one: what the function does in
    Python is done once.

    Example:
        double = CachedTrace(lambda tree: jax.tree.map(lambda leaf: 2 * leaf, tree))
        shapes = jax.eval_shape(double, {"x": jnp.ones(3)})
        doubled = jax.jit(double)({"x": jnp.ones(3)})

    Args:
        function: of trees of arrays and of anything else; what it does depends on nothing but them.
            Keyword arguments say what its errors name; they do not make another kind.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._traces: dict[Any, _Trace] = {}

    def __call__(self, *arguments: Any, **notes: Any) -> Any:
        leaves, treedef = jax.tree.flatten(arguments)
        key = treedef, tuple(map(leaf_signature, leaves))
        if key not in self._traces:
            self._traces[key] = _Trace(self._function, leaves, treedef)
        return self._traces[key](leaves, notes)


class _Trace:
    """One kind of arguments.

    Args:
        function: the function.
        leaves: of the arguments, of which everything that is not an array is kept.
        treedef: of the arguments.
    """

    def __init__(self, function: Callable[..., Any], leaves: list[Any], treedef: Any) -> None:
        self._function = function
        self._treedef = treedef
        self._leaves = [None if is_array(leaf) else leaf for leaf in leaves]
        self._array_indices = [index for index, leaf in enumerate(leaves) if is_array(leaf)]
        self._result_leaves: list[Any] = []
        self._result_treedef: Any = None
        # Not only the first call runs the function: one whose trace failed is followed by another,
        # and where `jax_debug_nans` is set, JAX runs it again operation by operation.
        self._notes: dict[str, Any] = {}
        self._run = jax.jit(self._trace)

    def __call__(self, leaves: list[Any], notes: dict[str, Any]) -> Any:
        self._notes = notes
        results = iter(self._run([leaves[index] for index in self._array_indices]))
        leaves = [next(results) if leaf is _ARRAY else leaf for leaf in self._result_leaves]
        return jax.tree.unflatten(self._result_treedef, leaves)

    def _trace(self, arrays: list[Array]) -> list[Array]:
        leaves = list(self._leaves)
        for index, array in zip(self._array_indices, arrays, strict=True):
            leaves[index] = array
        arguments = jax.tree.unflatten(self._treedef, leaves)
        result = self._function(*arguments, **self._notes)
        result_leaves, self._result_treedef = jax.tree.flatten(result)
        self._result_leaves = [_ARRAY if is_array(leaf) else leaf for leaf in result_leaves]
        return [leaf for leaf in result_leaves if is_array(leaf)]


_ARRAY = object()
"""Stands in the place of an array among the leaves of a result."""
