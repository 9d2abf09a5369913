"""How large trees of arrays are."""

from typing import Any

import jax
import jax.numpy as jnp
from fulgurite.metrics import Mask, Mean, Metric, Value, Values, to_float
from jaxtyping import Array, PyTree, Shaped


class Norm(Metric):
    """The Euclidean norm of all numbers in a tree together, or of each vector; merged, the mean of
    the norms. NaN without any.

    Example:
        from fulgurite_metrics import Norm

        Norm.from_tree(eqx.filter(model, eqx.is_inexact_array)).compute()
    """

    mean: Mean

    @staticmethod
    def from_tree(tree: PyTree[Shaped[Array, "..."]]) -> "Norm":
        """Return the norm of all leaves together, as of one long vector."""
        squares: list[Any] = [
            jnp.sum(to_float(jnp.abs(leaf)) ** 2) for leaf in jax.tree.leaves(tree)
        ]
        total = sum(squares, jnp.zeros(()))
        return Norm(Mean.from_values(jnp.sqrt(total)))

    @staticmethod
    def from_vectors(values: Values, mask: Mask | None = None, axis: int = -1) -> "Norm":
        """Return the mean norm of vectors, in float32.

        Args:
            values: with the numbers of a vector along an axis.
            mask: which vectors count, over all other axes or the leading ones.
            axis: along which a vector is.
        """
        numbers = jnp.asarray(values)
        if jnp.iscomplexobj(numbers):
            numbers = jnp.abs(numbers)
        norms = jnp.linalg.norm(numbers.astype(jnp.float32), axis=axis)
        return Norm(Mean.from_values(norms, mask))

    def compute(self) -> Value:
        return self.mean.compute()
