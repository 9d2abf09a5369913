"""An optimizer that gets the mean of the gradients of several steps."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from fulgurite.plugins import leaves_with_paths
from jaxtyping import Array, Float, Int, PyTree

from fulgurite_optimizers.metrics import zeros_like_spec
from fulgurite_optimizers.microbatches import add_weighted, divide, get_accumulation_dtype


class StepsState(NamedTuple):
    """The state of `accumulate_over_steps`.

    Attributes:
        num_accumulated: the number of gradients that are not applied yet.
        weight: what they are means over, added up.
        grads: their sum by weight, at least float32.
        inner: the state of the optimizer.
    """

    num_accumulated: Int[Array, ""]
    weight: Float[Array, ""]
    grads: PyTree
    inner: PyTree


def accumulate_over_steps(
    optimizer: optax.GradientTransformation, n: int
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer whose every `n`-th update is that of `optimizer` for the mean of the last
    `n` gradients, and whose other updates are zero.

    `update(grads, state, params, weight=weight)` takes a gradient that is a mean over `weight`.
    `update(None, state, params, finish=True)` returns the update for the mean of those that are
    left, if there are any. `GradientAccumulation` says why this is not `optax.MultiSteps`.

    Args:
        optimizer: the optimizer to run in every `n`-th step.
        n: the number of gradients for one update.
    """

    def make_empty(params: Any, inner: Any) -> StepsState:
        sums = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, get_accumulation_dtype(leaf.dtype)), params
        )
        return StepsState(jnp.int32(0), jnp.float32(0), sums, inner)

    def init(params: Any) -> StepsState:
        return make_empty(params, optimizer.init(params))

    def update(
        updates: Any, state: Any, params: Any = None, *, weight: Any = None, finish: bool = False
    ) -> tuple[Any, StepsState]:
        if not finish:
            weight = jnp.asarray(weight, jnp.float32)
            state = StepsState(
                state.num_accumulated + 1,
                state.weight + weight,
                jax.tree.map(partial(add_weighted, weight=weight), state.grads, updates),
                state.inner,
            )

        def apply(state: StepsState) -> tuple[Any, StepsState]:
            mean = jax.tree.map(
                lambda total, param: divide(total, state.weight).astype(param.dtype),
                state.grads,
                params,
            )
            updates, inner = optimizer.update(mean, state.inner, params)
            return updates, make_empty(params, inner)

        def wait(state: StepsState) -> tuple[Any, StepsState]:
            spec, _ = jax.eval_shape(apply, state)
            return jax.tree.map(zeros_like_spec, spec), state

        is_due = state.num_accumulated > 0 if finish else state.num_accumulated >= n
        return jax.lax.cond(is_due, apply, wait, state)

    return optax.GradientTransformationExtraArgs(init, update)


def count_waiting(opt_state: PyTree, paths: set[str]) -> int:
    """Return how many gradients wait for the next update of parameters; 0 where each step updates
    them.

    Args:
        opt_state: the optimizer state of a train state.
        paths: of the parameters in the module.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=_is_steps_state)
    counts = [
        int(node.num_accumulated)
        for node in nodes
        if _is_steps_state(node) and paths & {path for path, _ in leaves_with_paths(node.grads)}
    ]
    return max(counts, default=0)


def _is_steps_state(node: Any) -> bool:
    return isinstance(node, StepsState)
