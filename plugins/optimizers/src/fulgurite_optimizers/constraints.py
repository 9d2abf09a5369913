"""Plugins that keep weights within a set, after every update."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite import Selector
from fulgurite.errors import ConfigurationError
from fulgurite.plugins import hide_constructor_frames
from jaxtyping import Array, Inexact

from fulgurite_optimizers.microbatches import get_accumulation_dtype


@hide_constructor_frames
@dataclass(frozen=True)
class Constraint:
    """The base class: changes the floating-point arrays that `where` selects, after every update.

    Several constraints are applied in order, and before averages of the weights see them, wherever
    these are listed. List `Lookahead` after those that a mean of two allowed weights fulfills too,
    and before others, such as `UnitNorm`. If a phase repeats its update in a step, the constraint
    applies after the last one.

    Attributes:
        where: the arrays: a pattern, a function of the module, or a selection by `fg.select` and
            `fg.exclude`.

    Example:

        from fulgurite_optimizers import Constraint

        class AtMostOne(Constraint):
            def __call__(self, weight):
                return jnp.minimum(weight, 1)
    """

    before = ("average",)

    where: Selector | str | Callable[[Any], Any]

    def __post_init__(self) -> None:
        if not isinstance(self.where, Selector):
            object.__setattr__(self, "where", fg.select(self.where))

    @fg.hookimpl
    def after_update(self, module: Any, plugin_state: Any) -> tuple[Any, Any]:
        """Return the module with the constraint applied."""
        return self.constrain(module), plugin_state

    @fg.hookimpl
    def after_finalize(self, module: Any, plugin_state: Any) -> tuple[Any, Any]:
        """Do so after the update at the end of training."""
        return self.constrain(module), plugin_state

    def constrain(self, module: Any) -> Any:
        """Return a module with the constraint applied to what `where` selects of it."""
        assert isinstance(self.where, Selector)

        def constrain(leaf: Any, is_selected: bool) -> Any:
            return self(leaf) if is_selected and eqx.is_inexact_array(leaf) else leaf

        return jax.tree.map(constrain, module, self.where(module))

    @abstractmethod
    def __call__(self, weight: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
        """Return the allowed weight that replaces `weight`."""


@hide_constructor_frames
@dataclass(frozen=True)
class UnitNorm(Constraint):
    """Scales vectors along an axis to Euclidean length 1; zero vectors stay zero.

    Attributes:
        axis: the axis or axes of each vector. By default the vectors are the rows of an
            `eqx.nn.Linear`, the weights of one output.

    Example:

        from fulgurite_optimizers import UnitNorm

        UnitNorm("linear.weight")
    """

    axis: int | tuple[int, ...] = -1

    def __call__(self, weight: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
        # Squares of half precision are infinite from 256 on, and zero below 2e-4.
        wide = weight.astype(get_accumulation_dtype(weight.dtype))
        try:
            norm = jnp.linalg.norm(wide, axis=self.axis, keepdims=True)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"UnitNorm: an array {list(weight.shape)} has no axis {self.axis!r}: choose "
                "another axis, or select other arrays"
            ) from error
        unit = wide / jnp.where(norm == 0, 1, norm).astype(wide.dtype)
        return jnp.where(norm == 0, weight, unit.astype(weight.dtype))


@hide_constructor_frames
@dataclass(frozen=True)
class NonNegative(Constraint):
    """Sets negative numbers to zero.

    Example:

        from fulgurite_optimizers import NonNegative

        NonNegative("scale")
    """

    def __call__(self, weight: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
        _check_real(weight, "NonNegative")
        return jnp.maximum(weight, 0)


@hide_constructor_frames
@dataclass(frozen=True)
class WeightClip(Constraint):
    """Clips every number to -max_value ... max_value, as for the critic of a Wasserstein GAN
    (Arjovsky et al., 2017).

    Attributes:
        max_value: the largest absolute value.

    Example:

        from fulgurite_optimizers import WeightClip

        WeightClip("critic", max_value=0.01)
    """

    max_value: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.max_value, Real) or not self.max_value > 0:
            raise ConfigurationError(
                f"WeightClip: max_value is {self.max_value!r}; it must be positive"
            )

    def __call__(self, weight: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
        _check_real(weight, "WeightClip")
        # A float of NumPy would make float32 of half precision.
        limit = float(self.max_value)
        return jnp.clip(weight, -limit, limit)


class ModuleConstraints(fg.Plugin):
    """Applies the constraints that the layers of a model ask for, after every update.

    Those are what a method `constraints(self)` returns, of the module or of any `eqx.Module` in it:
    a list of `Constraint`s, whose selections begin at that layer. Those of inner layers come
    first.

    Example:
        from fulgurite_optimizers import ModuleConstraints, NonNegative

        class Scale(eqx.Module):
            factor: jax.Array

            def constraints(self):
                return [NonNegative("factor")]


        engine = fg.Engine(steps=100, plugins=[ModuleConstraints()])
    """

    plugin_name = "module_constraints"
    before = ("average",)

    @fg.hookimpl
    def after_update(self, module: Any, plugin_state: Any) -> tuple[Any, Any]:
        """Return the module with the constraints applied."""
        return self._constrain(module), plugin_state

    @fg.hookimpl
    def after_finalize(self, module: Any, plugin_state: Any) -> tuple[Any, Any]:
        """Do so after the update at the end of training."""
        return self._constrain(module), plugin_state

    def _constrain(self, module: Any) -> Any:
        if not any(map(_has_constraints, jax.tree.leaves(module, is_leaf=_has_constraints))):
            raise ConfigurationError(
                f"ModuleConstraints: no layer of {type(module).__name__} has a method "
                "constraints(self): define it, or leave the plugin out"
            )
        return _constrain_layers(module)


def _has_constraints(node: Any) -> bool:
    is_layer = isinstance(node, eqx.Module)
    return is_layer and callable(getattr(type(node), "constraints", None))


def _constrain_layers(node: Any) -> Any:
    """Return a part of a module with the constraints of its layers, and its own, applied."""

    def is_inner_layer(inner: Any) -> bool:
        return inner is not node and _has_constraints(inner)

    def constrain(inner: Any) -> Any:
        return _constrain_layers(inner) if is_inner_layer(inner) else inner

    constraints = node.constraints() if _has_constraints(node) else []
    is_list = isinstance(constraints, list | tuple)
    if not is_list or not all(isinstance(item, Constraint) for item in constraints):
        raise ConfigurationError(
            f"{type(node).__name__}.constraints returned {constraints!r}: return a list of "
            "constraints, such as [NonNegative('factor')]"
        )
    node = jax.tree.map(constrain, node, is_leaf=is_inner_layer)
    for constraint in constraints:
        node = constraint.constrain(node)
    return node


def _check_real(weight: Inexact[Array, "..."], name: str) -> None:
    """Raise a ConfigurationError if a weight is complex.

    Args:
        weight: the weight.
        name: of the constraint.
    """
    if jnp.iscomplexobj(weight):
        raise ConfigurationError(
            f"{name}: an array {list(weight.shape)} is {weight.dtype}, and complex numbers have no "
            "order: select other arrays, or use a Constraint of your own"
        )
