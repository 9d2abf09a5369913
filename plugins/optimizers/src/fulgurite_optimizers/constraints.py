"""Plugins that keep weights where they must be, after every update."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import ConfigurationError
from fulgurite.tree.select import Selector
from jaxtyping import Array, Float


@dataclass(frozen=True)
class Constraint:
    """The base class: changes the floating-point arrays that `where` selects, after every update.
    Several constraints are applied in order.

    If a phase repeats its update in a step, the constraint applies after the last one.

    Example:
        from fulgurite_optimizers import Constraint


        class ZeroMean(Constraint):
            def __call__(self, weight):
                return weight - weight.mean()


        engine = fg.Engine(steps=100, plugins=[ZeroMean("linear.weight")])
    """

    where: Selector | str | Callable[[Any], Any]

    def __post_init__(self) -> None:
        if not isinstance(self.where, Selector):
            object.__setattr__(self, "where", fg.select(self.where))

    @fg.hookimpl
    def after_update(self, module: Any, plugin_state: Any) -> tuple[Any, Any]:
        """The module with weights as they must be."""
        assert isinstance(self.where, Selector)

        def changed(leaf: Any, yes: bool) -> Any:
            return self(leaf) if yes and eqx.is_inexact_array(leaf) else leaf

        return jax.tree.map(changed, module, self.where(module)), plugin_state

    @abstractmethod
    def __call__(self, weight: Float[Array, "..."]) -> Float[Array, "..."]:
        """The allowed weight that replaces `weight`."""


@dataclass(frozen=True)
class UnitNorm(Constraint):
    """Scales vectors along `axis` to Euclidean length 1; zero vectors stay zero. By default these
    are the rows of an `eqx.nn.Linear`, the weights of one output.

    Example:
        from fulgurite_optimizers import UnitNorm

        engine = fg.Engine(steps=100, plugins=[UnitNorm("linear.weight")])
    """

    axis: int | tuple[int, ...] = -1

    def __call__(self, weight: Float[Array, "..."]) -> Float[Array, "..."]:
        try:
            norm = jnp.linalg.norm(weight, axis=self.axis, keepdims=True)
        except (TypeError, ValueError) as error:
            gap = f"UnitNorm: an array {list(weight.shape)} has no axis {self.axis!r}"
            raise ConfigurationError(f"{gap}: choose another, or other arrays") from error
        return jnp.where(norm == 0, weight, weight / jnp.where(norm == 0, 1, norm))


@dataclass(frozen=True)
class NonNegative(Constraint):
    """Sets negative numbers to zero.

    Example:
        from fulgurite_optimizers import NonNegative

        engine = fg.Engine(steps=100, plugins=[NonNegative("linear.weight")])
    """

    def __call__(self, weight: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.maximum(weight, 0)


@dataclass(frozen=True)
class WeightClip(Constraint):
    """Clips every number to -limit ... limit, as for the critic of a Wasserstein GAN (Arjovsky et
    al., 2017).

    Example:
        from fulgurite_optimizers import WeightClip

        engine = fg.Engine(steps=100, plugins=[WeightClip("critic", limit=0.01)])
    """

    limit: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.limit, int | float) or not self.limit > 0:
            raise ConfigurationError(f"WeightClip: limit is {self.limit!r}; it must be positive")

    def __call__(self, weight: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.clip(weight, -self.limit, self.limit)
