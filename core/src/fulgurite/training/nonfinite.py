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
NamedArrays = list[tuple[str, Array]]


class NonFiniteTracker(eqx.Module):
    """The first step whose update was not finite and was not skipped, and which value of it.

    It is sticky: later steps do not change it. NaN gradients under a finite loss are the common
    case, so looking at the loss is not enough.

    Looking is what a step of large matrices pays for: a step of MLP 784-256-10 takes 1.07 of one by
    hand, and 1.01 with `on_nonfinite="ignore"`. On eight simulated devices a data-parallel step of
    that network takes 6.0 ms against 5.6, a fully sharded one 7.3 against 6.2, where what the
    devices found is one more all-reduce. To divide replicated arrays among the devices was tried
    (9.9 ms), and so was to leave a number for each row, which saves a product.

    Looking also costs the last bit: it makes XLA fuse the rest of the step differently. A step with
    `on_nonfinite="ignore"` has the bits of a function written by hand and compiled with the same
    options; any other differs from it by rounding.

    Attributes:
        step: int32, the first such step, or -1.
        term_index: int32, the index of the first term of that step that is not finite, or -1.
        skipped: int32, the number of updates left out by the policy `skip`.
        ignored: bool `(parameters,)`, the arrays that were not finite from the beginning, such as a
            mask of -inf.
    """

    step: Int[Array, ""]
    term_index: Int[Array, ""]
    skipped: Int[Array, ""]
    ignored: Bool[Array, " parameters"]

    @staticmethod
    def init(module: PyTree) -> "NonFiniteTracker":
        """Return the tracker of a state in which no step was taken yet."""
        ignored = [
            jnp.any(_finite_probe(leaf, elementwise_limit=0) != 0)
            for _, leaf in _get_floating_arrays(module)
        ]
        return NonFiniteTracker(
            jnp.int32(-1), jnp.int32(-1), jnp.int32(0), jnp.array(ignored, bool)
        )

    def check(
        self, output: Output, updated_module: PyTree, module: PyTree, elementwise_limit: int
    ) -> tuple[Bool[Array, ""], Int[Array, ""], list[str]]:
        """Look whether anything of a step is not finite.

        Args:
            output: of the step, with `grads`.
            updated_module: the module after the update. That an update was not finite shows in the
                parameter, which is written anyway; to look at the updates would force them into
                memory.
            module: what `after_update` made of it. It is looked at in addition, where it is another
                array, and not instead: a constraint may hide an infinite parameter, or turn a
                finite one into NaN.
            elementwise_limit: the size up to which the elements of an array are looked at one by
                one. Without a mesh that halves the number of products; on a mesh such elements
                would be gathered.

        Returns:
            Whether anything is not finite, the index of the first such term, and the names of all
            terms.
        """
        probes = [
            (name, _finite_probe(leaf, elementwise_limit)) for name, leaf in _get_terms(output)
        ]
        parameters = zip(
            _get_floating_arrays(updated_module), _get_floating_arrays(module), strict=True
        )
        for index, ((path, leaf), (_, final_leaf)) in enumerate(parameters):
            looked_at = [(f"the update of {path}", leaf)]
            if final_leaf is not leaf:
                looked_at.append((f"what after_update made of {path}", final_leaf))
            for name, array in looked_at:
                probe = _finite_probe(array, elementwise_limit)
                probes.append((name, jnp.where(self.ignored[index], 0, probe)))
        names = [name for name, probe in probes for _ in range(probe.size)]
        is_bad = jnp.concatenate([probe for _, probe in probes]) != 0
        # A minimum over positions, without a `cond`.
        positions = jnp.arange(len(names), dtype=jnp.int32)
        term_index = jnp.min(jnp.where(is_bad, positions, len(names)))
        return term_index < len(names), term_index, names

    def update(
        self, step: Int[Array, ""], bad: Bool[Array, ""], term_index: Int[Array, ""], skip: bool
    ) -> "NonFiniteTracker":
        """Return the tracker after an update.

        Args:
            step: the number of the update.
            bad: whether anything of it was not finite.
            term_index: the first such term.
            skip: whether a bad update is left out.
        """
        if skip:
            return replace(self, skipped=self.skipped + bad)
        is_first = bad & (self.step < 0)
        return replace(
            self,
            step=jnp.where(is_first, step, self.step),
            term_index=jnp.where(is_first, term_index, self.term_index),
        )


def _get_terms(output: Output) -> NamedArrays:
    """Return the losses and gradients of a step, each with a name for the message."""
    if output.losses:
        losses = output.losses
    else:
        losses = {} if output.loss is None else {"loss": output.loss}
    terms = [
        ("the loss" if name == "loss" else f"the loss term {name!r}", value)
        for name, value in losses.items()
    ]
    gradients = _get_floating_arrays(output.grads)
    return [*terms, *((f"the gradient of {path}", leaf) for path, leaf in gradients)]


def _get_floating_arrays(tree: Any) -> NamedArrays:
    """Return the floating-point arrays of a tree that are not empty, by path."""
    arrays = eqx.filter(tree, eqx.is_inexact_array)
    return [(path, leaf) for path, leaf in leaves_with_paths(arrays) if leaf.size]


def _finite_probe(leaf: Array, elementwise_limit: int) -> Float[Array, " marks"]:
    """Return zeros, with NaN among them where an element of an array is not finite.

    The zeros are `0 * x` for each element of a small array, and products with zeros for a large
    one, which CPU backends vectorize: a look at 0.8 MB takes 30 µs. Maxima of bits, sums and
    `isfinite` took two to five times as long, because they add up one by one, which also costs the
    host allocations: a small step has 65 instead of 159 of them.

    Args:
        leaf: a floating-point array that is not empty.
        elementwise_limit: the largest size of an array that counts as small.
    """
    zeros = partial(jnp.zeros, dtype=leaf.dtype)
    if leaf.size <= elementwise_limit:
        return jnp.real(leaf.reshape(-1) * 0).astype(jnp.float32)
    if leaf.ndim > 1:
        leaf = leaf.reshape(-1, leaf.shape[-1]) @ zeros(leaf.shape[-1])
    # Two columns, because the product of two vectors becomes a sum again.
    return jnp.real(leaf.reshape(-1) @ zeros((leaf.size, 2))).astype(jnp.float32)
