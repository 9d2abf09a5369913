"""Norms of gradients, updates and parameters, and learning rates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import optax
from fulgurite.errors import ConfigurationError
from fulgurite.tree.select import Selector
from jaxtyping import Array, Float, PyTree

KINDS = ("gradients", "updates", "parameters")


@dataclass(frozen=True)
class NormMonitor:
    """Logs Euclidean norms, only at log steps: at other steps nothing is computed.

    `norms/gradients` is that of the gradients as the optimizer receives them, `norms/updates` of
    what it returned, `norms/parameters` of the parameters after the update; float32 each. With
    groups there is also `norms/gradients/NAME` for each. If only a clock or a stop closes the
    window the value is NaN, because that is known too late.

    Attributes:
        of: which of the three.
        groups: selections of the module by name: `fg.select(...)`, or a pattern for it.
    """

    of: tuple[str, ...] = KINDS
    groups: Mapping[str, Selector | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.of or not set(self.of) <= set(KINDS):
            raise ConfigurationError(
                f"NormMonitor: of is {self.of!r}; it is a tuple of some of {', '.join(KINDS)}"
            )

    @fg.hookimpl
    def step_metrics(
        self, state: fg.TrainState, grads: PyTree, updates: PyTree, ctx: fg.Context
    ) -> dict[str, Any]:
        """The norms, behind a condition."""
        params = eqx.filter(state.module, eqx.is_inexact_array)
        trees = {"gradients": grads, "updates": updates, "parameters": params}
        if missing := [kind for kind in self.of if trees[kind] is None]:
            fix = (
                "have its output hold them, or choose others by {'norms': {'of': ('parameters',)}}"
            )
            raise ConfigurationError(
                f"NormMonitor: the update rule gives no {' and no '.join(missing)}: {fix}"
            )
        chosen = {name: _select(one)(state.module) for name, one in self.groups.items()}

        def norms() -> dict[str, Array]:
            whole = {kind: norm(trees[kind]) for kind in self.of}
            parts = {
                f"{kind}/{name}": norm(eqx.filter(trees[kind], spec))
                for kind in self.of
                for name, spec in chosen.items()
            }
            return whole | parts

        like = jax.eval_shape(norms)
        values = jax.lax.cond(
            ctx.is_due("log"), norms, lambda: {name: jnp.float32(jnp.nan) for name in like}
        )
        return {name: fg.metrics.LastValue.from_values(value) for name, value in values.items()}


@dataclass(frozen=True)
class LearningRateMonitor:
    """Logs the learning rate of the step's update as `learning_rate/OPTIMIZER`, of optimizers that
    expose it: `optax.inject_hyperparams(optax.adam)(learning_rate=...)`, with a number or a
        schedule. None that does is an error.
    """

    @fg.hookimpl
    def step_metrics(self, state: fg.TrainState) -> dict[str, Any]:
        """The rates, as the optimizer state holds them."""
        states = (
            state.opt_state if isinstance(state.opt_state, dict) else {"default": state.opt_state}
        )
        rates = {}
        for name, one in states.items():
            # A schedule's own state has the same name, and is no number.
            named = [value for _, value in optax.tree.get_all_with_path(one, "learning_rate")]
            found = [
                value
                for value in named
                if jnp.isscalar(value) or (isinstance(value, jax.Array) and value.ndim == 0)
            ]
            for number, value in enumerate(found, 1):
                rates[name if len(found) == 1 else f"{name}/{number}"] = (
                    fg.metrics.LastValue.from_values(value)
                )
        if not rates:
            raise ConfigurationError(
                "learning_rate: no optimizer exposes its learning rate. Write "
                "optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), or leave learning_rate "
                "out"
            )
        return rates


def norm(tree: PyTree) -> Float[Array, ""]:
    """The Euclidean norm over all arrays of a tree, summed in float32; of none, 0."""
    squares = [
        jnp.sum(jnp.square(jnp.abs(leaf).astype(jnp.float32))) for leaf in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def _select(what: Selector | str) -> Selector:
    return fg.select(what) if isinstance(what, str) else what
