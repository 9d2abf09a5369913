"""The plugin that limits the size of gradients."""

from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import optax
from fulgurite.errors import ConfigurationError, did_you_mean
from fulgurite.plugins import hide_constructor_frames, leaves_with_paths

from fulgurite_optimizers.microbatches import get_accumulation_dtype


@hide_constructor_frames
@dataclass(frozen=True)
class GradientClip(fg.Plugin):
    """Clips the gradients before an optimizer.

    Attributes:
        max_norm: the largest global norm over all arrays of the optimizer; larger gradients are
            scaled down.
        max_value: the largest absolute value of each number; clipped before the norm is taken.
        optimizer: the name of a phase; all phases by default.

    Example:

        from fulgurite_optimizers import GradientClip

        fg.Engine(steps=1000, plugins=[GradientClip(max_norm=1.0)])
    """

    max_norm: float | None = None
    max_value: float | None = None
    optimizer: str | None = None
    _known_optimizers: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        limits = [limit for limit in (self.max_norm, self.max_value) if limit is not None]
        if not limits or not all(_is_positive_number(limit) for limit in limits):
            raise ConfigurationError(
                f"{self} clips nothing: pass max_norm=1.0, or max_value=, a positive number"
            )

    @fg.hookimpl
    def gradient_transform(self, optimizer: str) -> optax.GradientTransformation | None:
        """Return the transformations of optax for an optimizer."""
        self._known_optimizers.add(optimizer)
        if self.optimizer not in (None, optimizer):
            return None
        transforms = []
        if self.max_value is not None:
            transforms.append(_clip_values(float(self.max_value)))
        if self.max_norm is not None:
            transforms.append(_clip_norm(float(self.max_norm)))
        return optax.chain(*transforms)

    @fg.hookimpl
    def wrap_update_rule(self, update_rule: Any) -> None:
        """Change nothing, but check the name of the optimizer: all are known by now."""
        known_optimizers = set(self._known_optimizers)
        # The next program, such as that of another engine, may lack what this one has.
        self._known_optimizers.clear()
        if self.optimizer is not None and self.optimizer not in known_optimizers:
            raise ConfigurationError(
                f"{self}: there is no such optimizer. "
                f"{did_you_mean(str(self.optimizer), known_optimizers)}"
            )


def _clip_values(max_value: float) -> optax.GradientTransformation:
    """Return `optax.clip`, which raises a ConfigurationError for complex gradients."""
    clip = optax.clip(max_value)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        for path, leaf in leaves_with_paths(updates):
            if jnp.iscomplexobj(leaf):
                raise ConfigurationError(
                    f"GradientClip: the gradient of {path} is {leaf.dtype}, and complex numbers "
                    "have no order to clip each by max_value: use max_norm"
                )
        return clip.update(updates, state, params)

    return optax.GradientTransformation(clip.init, update)


def _clip_norm(max_norm: float) -> optax.GradientTransformation:
    """Return `optax.clip_by_global_norm`, which computes in float32 at least.

    In float16 the norm is infinite from 256 on, and a sum of many small squares in bfloat16 stops
    growing.
    """
    clip = optax.clip_by_global_norm(max_norm)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        wide = jax.tree.map(lambda leaf: leaf.astype(get_accumulation_dtype(leaf.dtype)), updates)
        clipped, state = clip.update(wide, state, params)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), clipped, updates), state

    return optax.GradientTransformation(clip.init, update)


def _is_positive_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) > 0
