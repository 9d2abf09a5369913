"""Functions that are traced once: of trees, for each kind of arguments, and those that make a
model."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.extend.core.primitives import dynamic_slice_p, slice_p
from jaxtyping import Array, Key

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


class TracedInitializer:
    """A function of a random key that makes a tree, of which Python runs once.

    The first call traces it. Within a trace, its program becomes part of that one. Outside, the
    program runs operation by operation, with the bits of the function itself: 20 residual layers
    took 10 s to compile as one program, and take 0.4 so, because an operation is compiled once for
    each kind. The last bit may differ behind the few functions that JAX traces as several
    operations and compiles as one where they are called: `jnp.mean`.

    Example:
        make_model = TracedInitializer(lambda key: eqx.nn.Linear(2, 3, key=key))
        shapes = eqx.filter_eval_shape(make_model, jax.random.key(0))
        linear = make_model(jax.random.key(1))

    Args:
        function: what it does in Python may not depend on the value of the key.
    """

    def __init__(self, function: Callable[[Key[Array, ""]], Any]) -> None:
        self._function = function
        self._static: Any = None
        self._treedef: Any = None
        self._run_traced: Callable[..., list[Array]] | None = None
        self._run_operations: Callable[..., list[Array]] | None = None

    def __call__(self, key: Key[Array, ""]) -> Any:
        if self._run_traced is None or self._run_operations is None:
            program, specs, self._static = eqx.filter_make_jaxpr(self._function)(key)
            self._treedef = jax.tree.structure(specs)
            self._run_traced = jax.jit(jaxpr_as_fun(program))
            self._run_operations = jaxpr_as_fun(_slice_dynamically(program))
        run = self._run_traced if isinstance(key, Tracer) else self._run_operations
        arrays = jax.tree.unflatten(self._treedef, map(jnp.asarray, run(key)))
        return eqx.combine(arrays, self._static)


def _slice_dynamically(program: ClosedJaxpr) -> ClosedJaxpr:
    """Return a program in which where a slice begins is an argument of the slice: of the keys of
    400 layers, each would be a kind of operation otherwise."""
    equations = []
    for equation in program.jaxpr.eqns:
        strides = equation.params.get("strides") or ()
        if equation.primitive is slice_p and set(strides) <= {1}:
            equation = _make_dynamic(equation)
        equations.append(equation)
    return ClosedJaxpr(program.jaxpr.replace(eqns=equations), program.consts)


def _make_dynamic(equation: JaxprEqn) -> JaxprEqn:
    """Return the equation of a slice without strides as that of a dynamic slice."""
    starts, limits = equation.params["start_indices"], equation.params["limit_indices"]
    literals = [Literal(start, jax.typeof(start)) for start in map(np.int32, starts)]
    return equation.replace(
        primitive=dynamic_slice_p,
        invars=[*equation.invars, *literals],
        params={"slice_sizes": tuple(np.subtract(limits, starts).tolist())},
    )
