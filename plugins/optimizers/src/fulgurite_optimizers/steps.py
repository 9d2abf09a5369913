"""An optimizer that is given the mean of the gradients of several steps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree


class StepsState(NamedTuple):
    """The sum of `num_accumulated` gradients that are not applied yet, and the inner state."""

    num_accumulated: Int[Array, ""]
    grads: PyTree
    inner: PyTree


def accumulate_over_steps(
    optimizer: optax.GradientTransformation, n: int
) -> optax.GradientTransformationExtraArgs:
    """Gives updates of zero but for every `n`-th, which is the optimizer's for the mean of the last
    `n` gradients.

    `update(None, state, params, finish=True)` gives the one for the mean of those that are left, if
    there are any. Other than `optax.MultiSteps`, it adds up in the gradients' own dtype, and runs
    the optimizer only where its update is wanted.
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
            return updates, StepsState(
                jnp.int32(0), jax.tree.map(jnp.zeros_like, state.grads), inner
            )

        def wait(state: StepsState) -> tuple[Any, StepsState]:
            return jax.tree.map(jnp.zeros_like, state.grads), state

        return jax.lax.cond(
            state.num_accumulated > 0 if finish else state.num_accumulated >= n, apply, wait, state
        )

    return optax.GradientTransformationExtraArgs(init, update)
