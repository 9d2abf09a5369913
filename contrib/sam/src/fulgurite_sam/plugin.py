"""The plugin for sharpness-aware minimization."""

import math
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any

import fulgurite as fg
from fulgurite.errors import ConfigurationError, check_one_of
from fulgurite.plugins import hide_constructor_frames

from fulgurite_sam.rule import Ascent, SharpnessAwareUpdate


@hide_constructor_frames
@dataclass(frozen=True)
class Sam(fg.Plugin):
    """Minimizes the loss at the worst point near the weights, so that training ends in a flat
    minimum.

    Each gradient is that at `weights + radius * g / norm(g)`, where `g` is the gradient at the
    weights. A step costs two forward and backward passes. Losses, metrics, predictions and model
    state, such as the statistics of a BatchNorm layer, are those at the weights; both passes draw
    the same random numbers. The norm of `g` is logged as `train/sam/ascent_norm`, with several
    optimizers as `train/sam/NAME/ascent_norm`; with `adaptive`, that of `g` with each
    element multiplied by the size of its weight.

    The method is that of Foret et al., "Sharpness-Aware Minimization for Efficiently Improving
    Generalization", 2021; with `adaptive` that of Kwon et al., "ASAM", 2021, where the radius is
    relative to the size of each weight.

    Attributes:
        radius: of the ball in which the worst point is; Foret et al. call it rho. With `adaptive`
            it is larger, 0.5 to 2.
        adaptive: whether each weight is moved in proportion to its size.
        offset: added to the size of each weight, with `adaptive`.

    Example:
        from fulgurite_sam import Sam

        engine = fg.Engine(steps=100, plugins=[Sam(radius=0.05)])
        engine.fit(model, data)
    """

    # Within the loss scale of low precision: without it small gradients vanish in the ascent.
    before = ("precision",)

    radius: float = 0.05
    _: KW_ONLY
    adaptive: bool = False
    offset: float = 0.01

    def __post_init__(self) -> None:
        for name in ("radius", "offset"):
            value: Any = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not is_number or not 0 <= float(value) < math.inf:
                raise ConfigurationError(
                    f"Sam: {name} is {value!r}; it must be a number that is not negative"
                )
        check_one_of(self.adaptive, (True, False), "Sam: adaptive")

    @fg.hookimpl
    def wrap_update_rule(self, update_rule: fg.UpdateRule) -> fg.UpdateRule:
        """Return a rule whose gradients are those at the worst point."""
        inner_rule: Any = update_rule
        while inner_rule is not None:
            if isinstance(inner_rule, SharpnessAwareUpdate):
                raise ConfigurationError(
                    "Sam is listed twice, and a gradient has one worst point: leave one of them out"
                )
            inner_rule = getattr(inner_rule, "update_rule", None)
        offset = self.offset if self.adaptive else None
        return SharpnessAwareUpdate(update_rule, Ascent(self.radius, offset))
