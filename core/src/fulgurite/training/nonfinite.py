"""Whether a step was finite: losses, gradients as the optimizer receives them, and the parameters
it updated."""

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from fulgurite.model.module import Output
from fulgurite.tree.paths import leaves_with_paths

NonFinitePolicy = Literal["raise", "skip", "ignore"]
Terms = list[tuple[str, Array]]


class NonFiniteTracker(eqx.Module):
    """Sticky: the first step whose update was not finite and was not skipped, and what of it.

    NaN gradients under a finite loss are the common case, so that looking at the loss is not
    enough.

    Attributes:
        step: int32, the first such step, or -1.
        culprit: int32, the index of the first term of that step that is not finite, or -1.
        skipped: int32, the number of updates left out by the policy `skip`.
        exempt: bool `(parameters,)`, the arrays that were not finite from the beginning, such as a
            mask of -inf.
    """

    step: Int[Array, ""]
    term_index: Int[Array, ""]
    skipped: Int[Array, ""]
    ignored: Bool[Array, " parameters"]

    @staticmethod
    def init(module: PyTree) -> "NonFiniteTracker":
        """Of a state in which no step was taken yet."""
        exempt = [jnp.any(_finite_probe(leaf, 0) != 0) for _, leaf in _floating(module)]
        return NonFiniteTracker(jnp.int32(-1), jnp.int32(-1), jnp.int32(0), jnp.array(exempt, bool))

    def check(
        self, output: Output, updated: PyTree, module: PyTree, elementwise_limit: int
    ) -> tuple[Bool[Array, ""], Int[Array, ""], list[str]]:
        """Whether anything of a step is not finite, the index of the first such term, and the names
        of all terms.

        Args:
            output: of the step, with `grads`.
            updated: the module after the update. That an update was not finite shows in the
                parameter, which is written anyway.
            module: what `after_update` made of it, which is looked at where it is another one.
            few: the size up to which the elements of an array are looked at one by one.
        """
        losses = output.losses or ({} if output.loss is None else {"loss": output.loss})
        terms: Terms = [
            ("the loss" if name == "loss" else f"the loss term {name!r}", x)
            for name, x in losses.items()
        ]
        terms += [(f"the gradient of {path}", leaf) for path, leaf in _floating(output.grads)]
        marks = [(name, _finite_probe(leaf, elementwise_limit)) for name, leaf in terms]
        for index, ((path, leaf), (_, last)) in enumerate(
            zip(_floating(updated), _floating(module), strict=True)
        ):
            after = [] if last is leaf else [(f"what after_update made of {path}", last)]
            for name, one in [(f"the update of {path}", leaf), *after]:
                marks.append(
                    (name, jnp.where(self.ignored[index], 0, _finite_probe(one, elementwise_limit)))
                )
        names = [name for name, mark in marks for _ in range(mark.size)]
        found = jnp.concatenate([mark for _, mark in marks]) != 0
        culprit = jnp.min(jnp.where(found, jnp.arange(len(names), dtype=jnp.int32), len(names)))
        return culprit < len(names), culprit, names

    def update(
        self, step: Int[Array, ""], bad: Bool[Array, ""], culprit: Int[Array, ""], skip: bool
    ) -> "NonFiniteTracker":
        """The health after update number `step`, which was skipped if it was bad and `skip`
        holds."""
        if skip:
            return replace(self, skipped=self.skipped + bad)
        first = bad & (self.step < 0)
        return replace(
            self,
            step=jnp.where(first, step, self.step),
            term_index=jnp.where(first, culprit, self.term_index),
        )


def _floating(tree: Any) -> Terms:
    return [
        (path, leaf)
        for path, leaf in leaves_with_paths(eqx.filter(tree, eqx.is_inexact_array))
        if leaf.size
    ]


def _finite_probe(leaf: Array, few: int) -> Float[Array, " marks"]:
    """Zeros, with NaN among them where an element is not finite: one for each of at most `few`
    elements; of more, products with zeros, which CPU backends vectorize. They add up a sum one by
    one, which costs the host allocations.
    """
    zeros = partial(jnp.zeros, dtype=leaf.dtype)
    if leaf.size <= few:
        return jnp.real(leaf.reshape(-1) * 0).astype(jnp.float32)
    if leaf.ndim > 1:
        leaf = leaf.reshape(-1, leaf.shape[-1]) @ zeros(leaf.shape[-1])
    # Two columns, because the product of two vectors becomes a sum again.
    return jnp.real(leaf.reshape(-1) @ zeros((leaf.size, 2))).astype(jnp.float32)
