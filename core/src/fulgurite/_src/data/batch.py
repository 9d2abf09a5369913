"""What a data source yields: a pytree of arrays, alone or with what its arrays do not say."""

from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fulgurite._src.tree.specs import format_tree
from fulgurite.errors import DataError


# No array types on the fields of these two: jax also builds them around placeholders.
@partial(
    jax.tree_util.register_dataclass,
    data_fields=["value", "mask", "num_examples"],
    meta_fields=["spec"],
)
@dataclass(frozen=True, eq=False)
class Batch:
    """A batch with what its arrays do not say.

    Each `spec` is an executable of its own. A source whose batches differ declares one of each
    kind: `DataSource(source, batch_examples=...)`.

    Example:
        batch = fg.Batch({"x": np.zeros((4, 3))}, mask=np.array([True, True, True, False]))
        batch = fg.Batch({"x": np.zeros((4, 2))}, spec="images")
        graph = {"nodes": np.zeros((5, 3)), "edges": np.zeros((2, 8), int)}
        batch = fg.Batch(graph, num_examples=1)

    Attributes:
        value: a pytree of arrays `(batch, ...)`, which the step receives.
        mask: bool `(batch,)`, False for padding; None for a batch without padding.
        spec: something static that the step sees as `ctx.spec`, such as which task the batch is
            of; hashable, and compared by `==`.
        num_examples: how much the batch counts in means over batches, where its arrays do not all
            begin with the axis of the examples. Several processes add up what each gives.
    """

    value: Any
    mask: Any = None
    _: KW_ONLY
    spec: Hashable = None
    num_examples: Any = None

    @property
    def structure(self) -> Hashable:
        """What batches that share a program have in common, besides shapes."""
        return jax.tree.structure(self.value), self.spec


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class IndexedBatch:
    """A batch for `ArrayData.gather`.

    The compiled step gathers, so the arrays on the device are an argument of it. A jitted call of
    its own would spare `Program`, `CompiledStep` and `Loop` that argument. Measured on CPU with a
    perceptron of 64 inputs and batches of 32, it takes a step from 47 to 70 us. With 50 steps in an
    execution it costs no time, but it holds 50 batches at once on the device.

    Attributes:
        indices: the examples, int32 `(batch,)`. The index of padding is the number of examples,
            which is out of bounds.
        mask: that of a source that pads, or None.
    """

    indices: Any
    mask: Any


def as_batch(batch: Any) -> Batch:
    """Return what a data source yielded as a `Batch`.

    Args:
        batch: a `Batch`, or a pytree of arrays.

    Raises:
        DataError: its mask does not fit its arrays.
    """
    if not isinstance(batch, Batch):
        return Batch(batch)
    mask = batch.mask
    if mask is None:
        return batch
    shapes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch.value)}
    if not hasattr(mask, "shape") or mask.shape not in shapes or mask.dtype != bool:
        raise DataError(
            f"the mask is {format_tree(mask)}, not bool with one value an example of "
            f"{format_tree(batch.value)}"
        )
    return batch
