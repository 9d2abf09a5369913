"""The function that makes a model, traced once and run operation by operation."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.extend.core.primitives import dynamic_slice_p, slice_p
from jaxtyping import Array, Key, PyTree

from fulgurite._src import threefry
from fulgurite._src.threefry import Words
from fulgurite._src.training.host_draws import divide
from fulgurite._src.tree.specs import is_key, put_constant


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
        self._program: ClosedJaxpr | None = None
        self._run_traced: Callable[..., list[Array]] | None = None

    def __call__(self, key: Key[Array, ""]) -> Any:
        if self._program is None or self._run_traced is None:
            self._program, specs, self._static = eqx.filter_make_jaxpr(self._function)(key)
            self._treedef = jax.tree.structure(specs)
            self._run_traced = jax.jit(jaxpr_as_fun(self._program))
        if isinstance(key, Tracer):
            leaves = list(map(jnp.asarray, self._run_traced(key)))
        else:
            leaves = run_operations(self._program, key)
        return eqx.combine(jax.tree.unflatten(self._treedef, leaves), self._static)


def call_by_operations(function: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """Return what a function makes of a tree, such as the state of an optimizer, for which XLA
    compiles no constants: they are made on the host.

    Args:
        function: it has been traced before, so it needs no values.
        tree: whose arrays may be traced, or on another device than the default one; then the
            function is called as it is.
    """
    arrays = jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    place = put_constant(np.int32(0))
    if any(isinstance(array, Tracer) for array in (place, *arrays)):
        return function(tree)
    if any(array.devices() != place.devices() for array in arrays):
        return function(tree)
    program, specs, static = eqx.filter_make_jaxpr(function)(tree)
    leaves = run_operations(program, *arrays)
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(specs), leaves), static)


def run_operations(program: ClosedJaxpr, *arguments: Array) -> list[Array]:
    """Run a program operation by operation, and return its results.

    Args:
        program: the program.
        arguments: arrays, and keys of any kind. What is made of a key is left to XLA if it is not
            of the default kind, bound to a device, or not on a CPU.
    """
    words = [_read_words(argument) for argument in arguments]
    divided = divide(program, tuple(key is not None for key in words), make_constants=True)
    drawn = divided.draw([key for key in words if key is not None])
    others = [array for array, key in zip(arguments, words, strict=True) if key is None]
    results = jaxpr_as_fun(_slice_dynamically(divided.rest))(*drawn, *others)
    return [
        _put_literal(var) if isinstance(var, Literal) else result
        for var, result in zip(program.jaxpr.outvars, results, strict=True)
    ]


def _put_literal(literal: Any) -> Array:
    """Return a number that stands in a program as an array."""
    return put_constant(np.asarray(literal.val, literal.aval.dtype))


def _read_words(argument: Array | Key[Array, ""]) -> Words | None:
    """Return the words of a key, if its bits are to be drawn on the host; else None."""
    if any(device.platform != "cpu" for device in argument.devices()):
        return None  # not measured
    if argument.shape or not is_key(argument):
        return None
    words = threefry.read_words(argument)
    return None if words is None else np.array(words, np.uint32)


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
