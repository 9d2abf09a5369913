"""Whether padding counts in the numbers of a step that does not use its mask: seen in the traced
program, and where that is so, tried on a few examples.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array, Float

from fulgurite._src.data.batch import Batch, IndexedBatch, as_batch
from fulgurite._src.evaluation.loss_trial import lower_trial
from fulgurite._src.execution.dataflow import find_dependent_results
from fulgurite._src.metrics.conversion import sum_values
from fulgurite._src.training.forward import get_common_length
from fulgurite.errors import DataError

FIX = (
    "Leave padding out: fg.metrics.Mean.from_values(losses, ctx.mask) as the loss, or a sum over "
    "ctx.mask by hand; or give the source remainder='drop' or 'keep'"
)
"""What an error or a message about padding that counts ends with."""

ComputeNumbers = Callable[[Any, Any, Any], tuple[dict[str, Any], dict[str, Any]]]
"""`compute_numbers(target, batch, index)` returns the losses and the bare metrics of a step, each
under what it is in a sentence; another index is another random key."""
Prepare = Callable[..., tuple[Any, Batch]]
"""Called with arrays, traced: returns the target, a tuple that begins with the module, and a batch
without padding."""


class PaddingTrial(NamedTuple):
    """What padding does to the numbers that do not use the mask.

    Attributes:
        unused_by: these numbers, as in a sentence.
        sentences: one for each of them that padding changes.
        changes_gradient: whether padding changes the gradient of the losses among them.
        is_random: whether that is unknown, because the gradient differs with the random key.
    """

    unused_by: list[str]
    sentences: list[str]
    changes_gradient: bool
    is_random: bool


class _GradientChange(NamedTuple):
    """Largest absolute elements of gradients and of their differences.

    Attributes:
        size: of the gradient without padding.
        by_padding: of the difference that padding makes.
        by_key: of the difference that another random key makes.
    """

    size: Float[Array, ""]
    by_padding: Float[Array, ""]
    by_key: Float[Array, ""]


def has_padding(batch: Any) -> bool:
    """Return whether a batch, as a source yields it, has rows of padding."""
    mask = batch.mask if isinstance(batch, Batch | IndexedBatch) else None
    return mask is not None and not np.all(mask)


def choose_examples(batch: Any) -> Any:
    """Return a few examples of a masked batch, without padding; None if it cannot be divided.

    Args:
        batch: as the data source yields it.
    """
    parts = as_batch(batch)
    try:
        get_common_length(parts.value)
    except DataError:
        return None
    rows = np.flatnonzero(batch.mask)[:4]
    if parts.num_examples is not None or not len(rows):
        return None
    return jax.tree.map(lambda leaf: leaf[rows] if jnp.ndim(leaf) else leaf, batch)


def try_padding(
    compute_numbers: ComputeNumbers,
    prepare: Prepare,
    arguments: tuple[Any, ...],
) -> PaddingTrial | None:
    """Return what padding does to the numbers of a step, each of which is a loss or a bare metric;
    None if all of them use the mask.

    Args:
        compute_numbers: the step.
        prepare: returns what the step is called with.
        arguments: of `prepare`.
    """
    size = jax.eval_shape(lambda *arrays: prepare(*arrays)[1].mask, *arguments).size
    unused_by = _find_numbers_without_mask(compute_numbers, prepare, arguments, size)
    if not unused_by:
        return None

    def compute(target: tuple[Any, ...], batch: Any, index: Any) -> Any:
        params, static = eqx.partition(target[0], eqx.is_inexact_array)

        def add_losses(params: Any) -> tuple[Any, Any]:
            module = eqx.combine(params, static)
            losses, metrics = compute_numbers((module, *target[1:]), batch, index)
            numbers = losses | metrics
            terms = [jnp.asarray(losses[name]) for name in losses if name in unused_by]
            total = sum_values([jnp.zeros(()), *terms])
            return total, {name: numbers[name] for name in unused_by}

        gradient, numbers = jax.grad(add_losses, has_aux=True)(params)
        return numbers, gradient

    def run(*arguments: Any) -> Any:
        target, batch = prepare(*arguments)
        whole, gradient = compute(target, batch, 0)
        padded_batch = _pad(batch, size)
        padded, gradients = jax.lax.map(
            lambda index: compute(target, padded_batch, index), jnp.arange(2)
        )
        return whole, (padded, _compare_gradients(gradient, gradients))

    whole, (padded, change), noise = lower_trial(jax.jit(run), arguments).run(arguments)
    # Gradients are sums that cancel; padding changes them by more than a few percent.
    tolerance = min(50 * noise, 0.05) * change.size
    sentences = [
        f"{name} of {size} examples is {np.asarray(whole[name]):.6g}, and with as many rows of "
        f"padding {np.asarray(padded[name][0]):.6g}"
        for name in unused_by
        if _is_changed(whole[name], padded[name], noise)
    ]
    is_random = bool(change.by_key > tolerance)
    is_same = bool(change.by_padding <= tolerance) or not np.isfinite(change.size)
    return PaddingTrial(unused_by, sentences, not is_same and not is_random, is_random)


def _is_changed(whole: Any, padded: Any, noise: float) -> bool:
    """Return whether a number changes with padding and not with the random key.

    Args:
        whole: without padding.
        padded: with padding, with each of two random keys.
        noise: how far two computations of a number may be apart, relative to it.
    """
    value = np.asarray(whole, np.float64)
    with_padding, with_other_key = np.asarray(padded, np.float64)
    tolerance = noise * max(abs(value), abs(with_padding))
    if not np.isfinite(value) or abs(with_padding - with_other_key) > tolerance:
        return False  # nothing can be said of it
    return not abs(value - with_padding) <= tolerance


def _find_numbers_without_mask(
    compute_numbers: ComputeNumbers,
    prepare: Prepare,
    arguments: tuple[Any, ...],
    size: int,
) -> list[str]:
    """Return the names of the numbers whose program does not use the mask."""

    def compute(mask: Any, *arguments: Any) -> dict[str, Any]:
        target, batch = prepare(*arguments)
        losses, metrics = compute_numbers(target, replace(batch, mask=mask), 0)
        return losses | metrics

    mask = jax.ShapeDtypeStruct((size,), bool)
    # Its result is in the order of its keys, as those of any tree are.
    program, numbers = jax.make_jaxpr(compute, return_shape=True)(mask, *arguments)
    assert isinstance(program, ClosedJaxpr)
    uses = [True] + [False] * (len(program.jaxpr.invars) - 1)
    return [
        name
        for name, is_used in zip(
            sorted(numbers), find_dependent_results(program, uses), strict=True
        )
        if not is_used
    ]


def _pad(batch: Batch, size: int) -> Batch:
    """Return a batch of examples followed by as many rows of zeros, as `ArrayData` pads."""

    def pad(leaf: Any) -> Any:
        if jnp.ndim(leaf) == 0:
            return leaf
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jnp.concatenate([leaf, leaf if is_key else jnp.zeros_like(leaf)])

    mask = jnp.arange(2 * size) < size
    return replace(batch, value=jax.tree.map(pad, batch.value), mask=mask)


def _compare_gradients(gradient: Any, padded: Any) -> _GradientChange:
    """Return how gradients differ; traced.

    Args:
        gradient: without padding.
        padded: with padding, stacked over two random keys.
    """

    def find_largest(tree: Any) -> Any:
        leaves = [jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(tree) if leaf.size]
        return jnp.max(jnp.stack([jnp.zeros(()), *(leaf.astype(float) for leaf in leaves)]))

    def subtract(first: Any, second: Any) -> Any:
        return jax.tree.map(lambda a, b: a - b, first, second)

    first = jax.tree.map(lambda leaf: leaf[0], padded)
    second = jax.tree.map(lambda leaf: leaf[1], padded)
    return _GradientChange(
        find_largest(gradient),
        find_largest(subtract(first, gradient)),
        find_largest(subtract(first, second)),
    )
