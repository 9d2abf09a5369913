"""One optimizer after the other, in one run."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from fulgurite.errors import ConfigurationError, as_int
from jaxtyping import Array, Bool, Int, PyTree


class SwitchState(NamedTuple):
    """The state of `switch_optimizers`.

    Attributes:
        num_updates: the number of updates so far.
        states: of each optimizer, in their order. Those before the current one stay as they were,
            because a state has the same structure at all steps.
    """

    num_updates: Int[Array, ""]
    states: tuple[PyTree, ...]


def switch_optimizers(
    optimizers: Mapping[int, optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that is one of several, by the number of its updates.

    An optimizer begins with a new state, for the parameters as they are then, and its schedules
    begin with it. The states of all take memory from the beginning. Updates are counted as by a
    schedule: a step that is skipped, or that only accumulates, does not count.

    Args:
        optimizers: by the number of updates before the first one of each; the first number is 0.

    Raises:
        ConfigurationError: the numbers or optimizers are invalid.

    Example:
        from fulgurite_optimizers import switch_optimizers

        optimizer = switch_optimizers({0: optax.adam(1e-3), 1000: optax.sgd(1e-2)})
        task = fg.Task(model, optax.l2_loss, optimizer=optimizer)
    """
    starts, parts = _sort(optimizers)

    def init(params: PyTree) -> SwitchState:
        return SwitchState(jnp.int32(0), tuple(part.init(params) for part in parts))

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, SwitchState]:
        if params is None:
            raise ConfigurationError(
                "switch_optimizers: give the parameters, update(grads, state, params), because an "
                "optimizer that begins needs them"
            )

        def run(index: int) -> tuple[PyTree, tuple[PyTree, ...]]:
            part_state = state.states[index]
            if index > 0:
                is_first = state.num_updates == starts[index]
                fresh = parts[index].init(params)
                part_state = jax.tree.map(partial(_choose, is_first), fresh, part_state)
            new_updates, part_state = parts[index].update(updates, part_state, params, **extra_args)
            new_updates = jax.tree.map(_fill, new_updates, params, is_leaf=_is_none)
            return new_updates, (*state.states[:index], part_state, *state.states[index + 1 :])

        current = jnp.sum(state.num_updates >= jnp.asarray(starts, jnp.int32)) - 1
        branches = [partial(run, index) for index in range(len(parts))]
        dtypes = _promote(*(jax.eval_shape(branch)[0] for branch in branches))

        def run_alike(branch: Callable[[], tuple[PyTree, PyTree]]) -> tuple[PyTree, PyTree]:
            new_updates, states = branch()
            return jax.tree.map(jax.lax.convert_element_type, new_updates, dtypes), states

        alike = [partial(run_alike, branch) for branch in branches]
        new_updates, states = jax.lax.switch(current, alike)
        return new_updates, SwitchState(state.num_updates + 1, states)

    return optax.GradientTransformationExtraArgs(init, update)


def _sort(
    optimizers: Mapping[int, optax.GradientTransformation],
) -> tuple[tuple[int, ...], tuple[optax.GradientTransformationExtraArgs, ...]]:
    """Return the numbers of updates, ascending, and the optimizers that begin there."""
    where = "switch_optimizers"
    if not isinstance(optimizers, Mapping) or not optimizers:
        raise ConfigurationError(
            f"{where} got {optimizers!r}; give optimizers by the number of updates before them, "
            "such as {0: optax.adam(1e-3), 1000: optax.sgd(1e-2)}"
        )
    by_start: dict[int, optax.GradientTransformation] = {}
    for start, optimizer in optimizers.items():
        number = as_int(start)
        if type(number) is not int or number < 0:
            raise ConfigurationError(
                f"{where}: {start!r} is not a number of updates; give an integer that is 0 or more"
            )
        if not isinstance(optimizer, optax.GradientTransformation):
            raise ConfigurationError(
                f"{where}: the optimizer from {number} on is {optimizer!r:.200}; give one of "
                "optax. What says which parameters it has, as optimize_only does, goes around all "
                "of them"
            )
        by_start[number] = optimizer
    starts = tuple(sorted(by_start))
    if starts[0] != 0:
        raise ConfigurationError(
            f"{where}: no optimizer is there before update {starts[0]}: give one for 0"
        )
    return starts, tuple(optax.with_extra_args_support(by_start[start]) for start in starts)


def _fill(update: Any, param: Any) -> Any:
    """Return an update, zero for what an optimizer does not update and others may."""
    return jnp.zeros_like(param) if update is None and param is not None else update


def _promote(*specs: PyTree) -> PyTree:
    """Return the dtypes that hold the updates of all optimizers: moments in float32 make updates in
    float32 of bfloat16 parameters."""
    with jax.numpy_dtype_promotion("standard"):
        return jax.tree.map(lambda *leaves: jnp.result_type(*leaves), *specs)


def _is_none(node: Any) -> bool:
    return node is None


def _choose(condition: Bool[Array, ""], first: Array, second: Array) -> Array:
    return jnp.where(condition, first, second)
