"""The plugin for sharpness-aware minimization."""

import math
from dataclasses import KW_ONLY, dataclass

import fulgurite as fg
from fulgurite.errors import ConfigurationError

from fulgurite_sam.rule import Ascent, SharpnessAwareUpdate


@dataclass(frozen=True)
class Sam:
    """Minimizes the loss at the worst point near the weights, so that training ends in a flat
    minimum.

    Each gradient is that at `weights + radius * g / norm(g)`, where `g` is the gradient at the
    weights. A step costs two forward and backward passes. Losses, metrics, predictions and model
    state, such as the statistics of a BatchNorm layer, are those at the weights; both passes draw
    the same random numbers. The norm of `g` is logged as `train/sam/ascent_norm`, with several
    optimizers as `train/sam/NAME/ascent_norm`.

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

    # Outside of the loss scale of low precision, so that the norm is that of the loss itself.
    after = ("precision",)

    radius: float = 0.05
    _: KW_ONLY
    adaptive: bool = False
    offset: float = 0.01

    def __post_init__(self) -> None:
        for name in ("radius", "offset"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigurationError(
                    f"Sam: {name} is {value!r}; it must be a number that is not negative"
                )

    @fg.hookimpl
    def wrap_update_rule(self, rule: fg.UpdateRule) -> fg.UpdateRule:
        """Return a rule whose gradients are those at the worst point."""
        offset = self.offset if self.adaptive else None
        return SharpnessAwareUpdate(rule, Ascent(self.radius, offset))
