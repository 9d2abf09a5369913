"""Means over what each device computed, for the metrics of a step."""

from collections.abc import Sequence
from math import prod
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import ConfigurationError
from jaxtyping import Array, Bool, Float


def average_by_device(
    values: Float[Array, "examples ..."],
    mask: Bool[Array, " examples"] | None = None,
    weight: Float[Array, " examples"] | None = None,
    *,
    axes: Sequence[str] = ("data",),
) -> fg.metrics.Mean:
    """Return a metric of a step with a mean for each part of the batch, in the order of the
    devices: an array of numbers, such as the loss on each device. Nothing but these numbers is
    exchanged between devices.

    A batch that does not divide, such as the last one of an evaluation or a few examples on which a
    loss is tried, counts as if it were filled up at its end.

    Example:
        import optax
        from fulgurite_sharding import average_by_device

        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        metrics = {"device_losses": average_by_device(losses, mask)}

    Args:
        values: one or more for each example of the batch.
        mask: which examples count, as `ctx.mask`.
        weight: how much each example counts.
        axes: the axes of the mesh that divide the batch, as `Sharding.batch` names them.

    Raises:
        ConfigurationError: the mesh has no such axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    missing = [axis for axis in axes if not mesh.empty and axis not in mesh.shape]
    if missing:
        raise ConfigurationError(
            f"average_by_device: the mesh has no axis {missing[0]!r}; it has "
            f"{', '.join(mesh.shape)}: give axes=(...), those that divide the batch"
        )
    num_parts = 1 if mesh.empty else prod(mesh.shape[axis] for axis in axes)
    num_examples = len(values)
    num_missing = -num_examples % num_parts
    weights = jnp.ones(num_examples) if weight is None else jnp.asarray(weight)
    counts = jnp.ones(num_examples, bool) if mask is None else jnp.asarray(mask)

    def split(array: Any) -> Any:
        filled = jnp.pad(array, [(0, num_missing)] + [(0, 0)] * (array.ndim - 1))
        return filled.reshape(num_parts, -1, *array.shape[1:])

    return jax.vmap(fg.metrics.Mean.from_values)(
        split(jnp.asarray(values)), split(counts), split(weights)
    )
