"""Functions of one's own on the devices of a mesh."""

from collections.abc import Callable, Sequence
from functools import wraps
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from fulgurite.errors import ConfigurationError, DataError
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree


def parallel(
    fn: Callable[..., Any],
    mesh: Mesh | None,
    *,
    in_axes: int | Sequence[int | None] | None = 0,
    out_axes: int = 0,
    mesh_axes: Sequence[str] = ("data",),
) -> Callable[..., Any]:
    """Return a function, compiled, whose arguments are divided over the devices of a mesh.

    `fn` sees whole arrays, with an axis of examples, and treats each example alike. A number of
    examples that does not divide by the devices is filled up by repeating the last one; what comes
    of these is left out of the result. So `fn` must not sum over examples.

    Example:
        from fulgurite_sharding import parallel

        embed = parallel(lambda images: images.reshape(len(images), -1) / 255, engine.sharding.mesh)
        vectors = embed(np.zeros((10, 28, 28)))

    Args:
        fn: a pure function of trees of arrays.
        mesh: that of `engine.sharding.mesh`, or another; None for one device.
        in_axes: for each positional argument, or for all, where the axis of examples is; None for
            an argument that every device needs whole.
        out_axes: where the axis of examples is in every array of the result.
        mesh_axes: the axes of the mesh that divide the examples.

    Raises:
        ConfigurationError: the mesh has no such axis.
    """
    missing = [axis for axis in mesh_axes if mesh is not None and axis not in mesh.shape]
    if mesh is not None and missing:
        raise ConfigurationError(
            f"parallel: the mesh has no axis {missing[0]!r}; it has {', '.join(mesh.shape)}"
        )
    compiled = jax.jit(fn)
    num_parts = 1 if mesh is None else prod(mesh.shape[axis] for axis in mesh_axes)

    @wraps(fn)
    def call(*args: PyTree) -> PyTree:
        axes = in_axes if isinstance(in_axes, Sequence) else [in_axes] * len(args)
        num_examples = _count_examples(args, axes)
        padded = [
            _place(arg, axis, num_examples, num_parts, mesh, mesh_axes)
            for arg, axis in zip(args, axes, strict=True)
        ]
        result = compiled(*padded)
        if num_examples % num_parts == 0:
            return result
        return jax.tree.map(
            lambda leaf: jax.lax.slice_in_dim(leaf, 0, num_examples, axis=out_axes), result
        )

    return call


def _count_examples(args: Sequence[PyTree], axes: Sequence[int | None]) -> int:
    sizes = {
        jnp.shape(leaf)[axis]
        for arg, axis in zip(args, axes, strict=True)
        if axis is not None
        for leaf in jax.tree.leaves(arg)
    }
    if len(sizes) != 1:
        text = f"{sorted(sizes)} examples" if sizes else "no argument with an axis of examples"
        raise DataError(f"parallel: the arguments have {text}; give all of them equally many")
    return sizes.pop()


def _place(
    arg: PyTree,
    axis: int | None,
    num_examples: int,
    num_parts: int,
    mesh: Mesh | None,
    mesh_axes: Sequence[str],
) -> PyTree:
    """Return an argument, filled up to what divides by the devices, on the mesh."""
    if axis is not None and num_examples % num_parts:
        missing = -num_examples % num_parts
        arg = jax.tree.map(lambda leaf: _repeat_last(leaf, axis, missing), arg)
    if mesh is None:
        return arg
    spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, tuple(mesh_axes))
    return jax.device_put(arg, NamedSharding(mesh, spec))


def _repeat_last(leaf: Any, axis: int, count: int) -> Any:
    widths = [(0, 0)] * jnp.ndim(leaf)
    widths[axis] = (0, count)
    return jnp.pad(leaf, widths, mode="edge")
