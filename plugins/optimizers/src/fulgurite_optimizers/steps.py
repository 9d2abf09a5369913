"""An optimizer that gets the mean of the gradients of several steps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree


class StepsState(NamedTuple):
    """The state of `accumulate_over_steps`.

    Attributes:
        num_accumulated: the number of gradients that are not applied yet.
        grads: their sum.
        inner: the state of the optimizer.
    """

    num_accumulated: Int[Array, ""]
    grads: PyTree
    inner: PyTree


def accumulate_over_steps(
    optimizer: optax.GradientTransformation, n: int
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer whose every `n`-th update is that of `optimizer` for the mean of the last
    `n` gradients, and whose other updates are zero.

    `update(None, state, params, finish=True)` returns the update for the mean of those that are
    left, if there are any. `GradientAccumulation` says why this is not `optax.MultiSteps`.

    Args:
        optimizer: the optimizer to run in every `n`-th step.
        n: the number of gradients for one update.
    """

    def init(params: Any) -> StepsState:
        return StepsState(
            jnp.int32(0), jax.tree.map(jnp.zeros_like, params), optimizer.init(params)
        )

    def update(
        updates: Any, state: Any, params: Any = None, *, finish: bool = False
    ) -> tuple[Any, StepsState]:
        if not finish:
            state = state._replace(
                num_accumulated=state.num_accumulated + 1,
                grads=jax.tree.map(jnp.add, state.grads, updates),
            )

        def apply(state: StepsState) -> tuple[Any, StepsState]:
            mean = jax.tree.map(
                lambda sum: sum / state.num_accumulated.astype(sum.dtype), state.grads
            )
            updates, inner = optimizer.update(mean, state.inner, params)
            zeros = jax.tree.map(jnp.zeros_like, state.grads)
            return updates, StepsState(jnp.int32(0), zeros, inner)

        def wait(state: StepsState) -> tuple[Any, StepsState]:
            # The dtype of an update may be another one than that of the gradient.
            spec, _ = jax.eval_shape(apply, state)
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), spec), state

        is_due = state.num_accumulated > 0 if finish else state.num_accumulated >= n
        return jax.lax.cond(is_due, apply, wait, state)

    return optax.GradientTransformationExtraArgs(init, update)
