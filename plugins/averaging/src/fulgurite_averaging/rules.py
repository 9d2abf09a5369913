"""How much the newest weights count in an average."""

import math
from dataclasses import KW_ONLY, dataclass
from numbers import Real

import jax.numpy as jnp
import numpy as np
from fulgurite.errors import (
    ConfigurationError,
    set_ints,
)
from fulgurite.plugins import hide_constructor_frames
from jaxtyping import Array, Float, Int


@hide_constructor_frames
@dataclass(frozen=True)
class EMA:
    """An exponential moving average: `average = decay * average + (1 - decay) * weights`.

    Example:
        from fulgurite_averaging import EMA

        EMA(half_life=1000)

    Attributes:
        decay: between 0 and 1, for each time that the average is updated.
        half_life: the number of updates of the weights after which they count half, instead of
            `decay`.
        every: the updates of the weights between two updates of the average. Every step is one,
            unless gradients are accumulated over steps.
        warmup: whether the decay is at most `(1 + t) / (10 + t)` at update t of the average, from 0
            (TensorFlow's `num_updates`).
        debiased: whether the initial weights do not count (Adam's correction): the first average is
            that of step `every`.
    """

    decay: float | None = None
    _: KW_ONLY
    half_life: float | None = None
    every: int = 1
    warmup: bool = False
    debiased: bool = False

    def __post_init__(self) -> None:
        if (self.decay is None) == (self.half_life is None):
            raise ConfigurationError("EMA: give either decay or half_life, such as EMA(0.999)")
        if self.decay is not None and not (_is_number(self.decay) and 0 <= self.decay < 1):
            raise ConfigurationError(
                f"EMA: decay is {self.decay!r}; it must be at least 0 and less than 1"
            )
        half_life = self.half_life
        if half_life is not None and not (_is_number(half_life) and 0 < half_life < math.inf):
            raise ConfigurationError(
                f"EMA: half_life is {self.half_life!r}; it must be a positive number of steps"
            )
        set_ints(self, "every")
        _check_every(self.every, "EMA")

    @property
    def decay_per_update(self) -> float:
        """The decay for each time that the average is updated."""
        if self.half_life is not None:
            return 0.5 ** (self.every / self.half_life)
        assert self.decay is not None
        return self.decay

    @property
    def after(self) -> int | float:
        """The step after which the average begins."""
        return 0

    def compute_weight(self, count: Int[Array, ""]) -> Float[Array, ""]:
        """Return how much the newest weights count.

        Args:
            count: how often the average was updated before.
        """
        # Not as 1 - decay, because float32 has few numbers just below 1.
        number = count.astype(float)
        weight = jnp.asarray(self._final_weight, float)
        if self.warmup:
            weight = jnp.maximum(weight, 9 / (10 + number))
        if self.debiased:
            # Exact at the first update, where the initial weights are to count nothing.
            return jnp.where(number == 0, 1, weight / self._sum_weights(number + 1))
        return weight

    @property
    def _log_decay(self) -> float:
        """The logarithm of the decay for each time that the average is updated."""
        if self.half_life is not None:
            return -self.every / self.half_life * math.log(2)
        assert self.decay is not None
        return math.log(self.decay) if self.decay > 0 else -math.inf

    @property
    def _final_weight(self) -> float:
        """How much the newest weights count after the warm-up."""
        return -math.expm1(self._log_decay)

    def _sum_weights(self, count: Float[Array, ""]) -> Float[Array, ""]:
        """Return how much all weights but the initial ones count together after `count` updates of
        the average: 1 minus the product of the decays."""
        if not self.warmup:
            return -jnp.expm1(self._log_decay * count)
        # The first decays are 1/10, 2/11, ..., up to the first that is too large.
        num_rising = jnp.minimum(count, self._count_rising())
        numbers = jnp.arange(1, 10, dtype=float)
        rising = jnp.prod(numbers / (numbers + num_rising))
        return 1 - rising * jnp.exp(self._log_decay * (count - num_rising))

    def _count_rising(self) -> float:
        """Return at how many updates the decay of `warmup` is below the final one."""
        return float(max(0, math.ceil(9 / self._final_weight - 10)))


@hide_constructor_frames
@dataclass(frozen=True)
class Mean:
    """The mean of the weights after all updates from a step on, as in stochastic weight averaging
    (SWA).

    Until then it is the current weights.

    Source: Izmailov et al. 2018, arXiv:1803.05407.

    Example:
        from fulgurite_averaging import Mean

        Mean(after=0.8, every=100)

    Attributes:
        after: the step after which the average begins, counted from step 0; a float below 1 is a
            part of the run that `fit` plans. In a second fit, from the state of the first, the
            latter begins a new mean, and the former continues that of the first; a run that is made
            longer keeps the step at which its mean began.
        every: the updates of the weights between two updates of the average, counted from `after`.
    """

    _: KW_ONLY
    after: int | float = 0
    every: int = 1

    def __post_init__(self) -> None:
        set_ints(self, "after", "every")
        is_part = isinstance(self.after, float | np.floating) and 0 <= self.after < 1
        if not is_part and (type(self.after) is not int or self.after < 0):
            raise ConfigurationError(
                f"Mean: after is {self.after!r}; it must be a step, or a part of the run: a float "
                "from 0 to 1"
            )
        _check_every(self.every, "Mean")

    def compute_weight(self, count: Int[Array, ""]) -> Float[Array, ""]:
        """Return how much the newest weights count.

        Args:
            count: how often the average was updated before.
        """
        return 1 / (count + 1).astype(float)


Rule = EMA | Mean


def _check_every(every: int, name: str) -> None:
    if type(every) is not int or every < 1:
        raise ConfigurationError(f"{name}: every is {every!r}; it must be a positive integer")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
