"""The learning rate at which the loss falls fastest."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, NamedTuple

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite.errors import (
    ConfigurationError,
    as_int,
    check_positive_int,
)
from fulgurite.metrics import is_beyond
from fulgurite.plugins import as_optimizer_specs, get_method
from jaxtyping import Array, Int

from fulgurite_tuner.trial import make_trial_engine

MAX_SKIPPED_STEPS = 100
"""After how many steps that were all left out, as not finite, a search ends."""


@dataclass(frozen=True)
class LearningRates:
    """Losses at rising learning rates.

    Example:
        from fulgurite_tuner import LearningRates

        rates = LearningRates([1e-3, 1e-2, 1e-1], [3.0, 2.0, 2.5], [3.0, 2.4, 2.5])
        print(rates.suggestion)

    Attributes:
        rates: one an update, equally spaced by their logarithm.
        losses: of the step with that rate, before its update; the mean of several steps that wait
            for one update, or that were left out before it.
        smoothed: their moving average, without a bias towards zero.
    """

    rates: list[float]
    losses: list[float]
    smoothed: list[float]

    @property
    def suggestion(self) -> float | None:
        """The rate at which the smoothed loss falls most steeply by the logarithm of the rate; None
        if it falls nowhere, or there are less than two points."""
        return suggest_rate(self.rates, self.smoothed)

    def to_svg(self) -> str:
        """Return a picture of the smoothed loss over the rates, as the text of an SVG file."""
        return _draw(self)


def find_learning_rate(
    engine: fg.Engine,
    model: Any,
    data: Any,
    optimizer: Callable[[optax.Schedule], optax.GradientTransformation],
    *,
    low: float = 1e-7,
    high: float = 1.0,
    steps: int = 100,
    smoothing: float = 0.9,
    divergence: float = 4.0,
) -> LearningRates:
    """Train for some updates with a learning rate that rises from `low` to `high`.

    A copy is trained by an engine of its own: model, engine, random numbers, files and the position
    in the data are as before, also after an exception. The arrays that are updated are those of the
    optimizer that model or engine have, if any. A part that is frozen until the end of an epoch or
    of training is so in all of the search.

    Source: Smith 2017, arXiv:1506.01186.

    Args:
        engine: whose plugins change the update, such as clipping or precision, and that says where
            it is computed.
        model: what `Engine.fit` takes.
        data: what `Engine.fit` takes; begins again from its first batch as often as needed.
        optimizer: `optimizer(schedule)` returns the optimizer, such as `optax.adamw`.
        low: the first rate.
        high: the last one.
        steps: how many rates, which is how many updates; gradients that are accumulated over steps
            take as many steps for each.
        smoothing: the decay of the moving average of the losses, from 0 to less than 1.
        divergence: stops as soon as the smoothed loss is this many times its smallest value, which
            is more than 1, or not finite. Of losses that are not positive, see `has_diverged`.

    Returns:
        The points up to there.

    Raises:
        ConfigurationError: a number makes no sense, or there are several optimizers.
    """
    rates = list_rates(low, high, steps)
    _check_settings(smoothing, divergence)

    def schedule(count: Any) -> Any:
        return low * (high / low) ** (count / max(steps - 1, 1))

    class Sweep:
        @fg.hookimpl
        def configure_optimizers(self, module: Any) -> dict[str, fg.OptimizerSpec]:
            name, spec = _find_spec(engine, module)
            return {name: replace(spec, optimizer=_count_updates(optimizer(schedule)))}

    trial = make_trial_engine(engine, Sweep())
    # By the number of updates before it: the loss of each step with that rate.
    losses: dict[int, list[float]] = {}
    smoothed: list[float] = []
    state = trial.init_state(model, data)
    num_updates = num_skipped = 0
    for batch in trial.iter_batches(data, steps=2**31 - 1):
        # A range without end and epochs.
        state, output = trial.step(state, batch, step_range=fg.StepRange(0))
        loss: Any = output.loss
        losses.setdefault(num_updates, []).append(float(loss))
        values = smooth([float(np.mean(values)) for values in losses.values()], smoothing)
        is_stuck = int(state.nonfinite.skipped) - num_skipped >= MAX_SKIPPED_STEPS
        if is_stuck or has_diverged(values, divergence):
            del losses[num_updates]
            break
        smoothed = values
        before, num_updates = num_updates, _read_num_updates(state)
        if num_updates > before:
            num_skipped = int(state.nonfinite.skipped)
        if num_updates >= steps:
            break
    means = [float(np.mean(values)) for values in losses.values()]
    return LearningRates([rates[count] for count in losses], means, smoothed[: len(means)])


class _CountState(NamedTuple):
    """The state of `_count_updates`.

    Attributes:
        num_updates: of the optimizer so far.
    """

    num_updates: Int[Array, ""]


def _count_updates(optimizer: Any) -> optax.GradientTransformation:
    """Return an optimizer that counts its updates, as its schedule does: not those that wait for
    others, and not those that are left out."""
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ConfigurationError(
            f"find_learning_rate: optimizer(schedule) returned {optimizer!r:.100}; return an "
            "optimizer of optax, such as optax.adamw(schedule)"
        )

    def init(params: Any) -> _CountState:
        return _CountState(jnp.int32(0))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, _CountState]:
        return updates, _CountState(state.num_updates + 1)

    return optax.chain(optimizer, optax.GradientTransformation(init, update))


def _read_num_updates(state: fg.TrainState) -> int:
    def is_count(node: Any) -> bool:
        return isinstance(node, _CountState)

    nodes = jax.tree.leaves(state.opt_state, is_leaf=is_count)
    return max(int(node.num_updates) for node in nodes if is_count(node))


def _find_spec(engine: fg.Engine, module: Any) -> tuple[str, fg.OptimizerSpec]:
    """Return the name of the optimizer that the search is in the place of, and what it updates.

    Args:
        engine: whose plugins may give the optimizer.
        module: the module.

    Raises:
        ConfigurationError: there are several.
    """
    source = "configure_optimizers"
    answer = engine.plugins.hooks.configure_optimizers.ask(module=module)
    if answer is not None:
        specs = as_optimizer_specs(answer[1], source)
    elif _has_optimizer(module):
        specs = as_optimizer_specs(get_method(module, "configure_optimizers")(module), source)
    else:
        specs = {"default": fg.OptimizerSpec(optax.identity())}
    if len(specs) > 1:
        raise ConfigurationError(
            f"find_learning_rate: there are several optimizers ({', '.join(specs)}), and the rates "
            "of all would rise at once: search with a model and an engine that have one of them"
        )
    return next(iter(specs.items()))


def _has_optimizer(module: Any) -> bool:
    """Return whether a module brings an optimizer, which a search does without."""
    configure = getattr(type(module), "configure_optimizers", None)
    if configure is fg.Task.configure_optimizers:
        return module.optimizer is not None
    return configure not in (None, fg.Module.configure_optimizers)


def list_rates(low: float, high: float, steps: int) -> list[float]:
    """Return rates that are equally spaced by their logarithm.

    Args:
        low: the first.
        high: the last.
        steps: how many.
    """
    steps = as_int(steps)
    check_positive_int(steps, "find_learning_rate: steps")
    if not _is_number(low) or not _is_number(high) or not 0 < low < high < math.inf:
        raise ConfigurationError(
            f"find_learning_rate: low is {low!r} and high is {high!r}; they must be positive, and "
            "low the smaller one"
        )
    return [float(rate) for rate in np.geomspace(low, high, steps)]


def _check_settings(smoothing: float, divergence: float) -> None:
    if not _is_number(smoothing) or not 0 <= smoothing < 1:
        raise ConfigurationError(
            f"find_learning_rate: smoothing is {smoothing!r}; it must be a number from 0 to less "
            "than 1: 0 for the losses as they are, 0.9 for about the mean of the last ten"
        )
    if not _is_number(divergence) or not divergence > 1:
        raise ConfigurationError(
            f"find_learning_rate: divergence is {divergence!r}; it must be a number above 1: how "
            "many times the smallest loss ends the search"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def smooth(losses: list[float], decay: float) -> list[float]:
    """Return the moving average of losses, corrected for its start at zero: that of constant losses
    is the constant.

    Args:
        losses: the losses.
        decay: from 0 to 1, exclusive.
    """
    average = 0.0
    values = []
    for count, loss in enumerate(losses, 1):
        average = decay * average + (1 - decay) * loss
        values.append(average / (1 - decay**count))
    return values


def has_diverged(smoothed: list[float], divergence: float) -> bool:
    """Return whether the last of the smoothed losses is far above the smallest, or not finite.

    Far is `divergence - 1` times their size: of positive losses the smallest one, so that it is
    `divergence` times the smallest; else the largest absolute value before the last one, because a
    loss that crosses zero would otherwise have no size.

    Args:
        smoothed: the losses.
        divergence: as said above.
    """
    last = smoothed[-1]
    if not math.isfinite(last):
        return True
    smallest = min(smoothed)
    size = smallest if smallest > 0 else max(map(abs, smoothed[:-1]), default=0.0)
    return size > 0 and is_beyond(last, smallest, "max", (divergence - 1) * size)


def suggest_rate(rates: list[float], losses: list[float]) -> float | None:
    """Return the rate at which losses fall most steeply by its logarithm, or None.

    The slope at a point is that of a line through a tenth of the points around it, because losses
    of single batches are noisy.

    Args:
        rates: rising.
        losses: one for each.
    """
    points = [
        (math.log(rate), loss)
        for rate, loss in zip(rates, losses, strict=True)
        if math.isfinite(loss)
    ]
    if len(points) < 2:
        return None
    logarithms, values = np.transpose(points)
    radius = max(1, len(points) // 20)
    slopes = []
    for center in range(len(points)):
        window = slice(max(0, center - radius), center + radius + 1)
        offsets = logarithms[window] - logarithms[window].mean()
        # A window at an end has less points, so that noise counts for more there.
        share = len(offsets) / (2 * radius + 1)
        slopes.append(share * (offsets @ values[window]) / (offsets @ offsets))
    steepest = int(np.argmin(slopes))
    is_falling = slopes[steepest] < -1e-6 * np.abs(values).max()
    return math.exp(logarithms[steepest]) if is_falling else None


def _draw(rates: LearningRates, width: int = 480, height: int = 300, margin: int = 40) -> str:
    if len(rates.rates) < 2:
        raise ConfigurationError("LearningRates: there are less than two points to draw")
    logarithms = np.log10(rates.rates)
    x = np.interp(logarithms, logarithms[[0, -1]], [margin, width - margin])
    low, high = min(rates.smoothed), max(rates.smoothed)
    y = np.interp(rates.smoothed, [low, high + 1e-12], [height - margin, margin])
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<polyline points="{points}" fill="none" stroke="#2563eb" stroke-width="2"/>',
        f'<text x="{margin}" y="{height - 12}">{rates.rates[0]:.1e}</text>',
        f'<text x="{width - margin}" y="{height - 12}" text-anchor="end">'
        f"{rates.rates[-1]:.1e}</text>",
        f'<text x="4" y="{margin}">{high:.3g}</text>',
        f'<text x="4" y="{height - margin}">{low:.3g}</text>',
    ]
    suggestion = rates.suggestion
    if suggestion is not None:
        position = float(np.interp(math.log10(suggestion), logarithms, x))
        parts.append(
            f'<line x1="{position:.1f}" x2="{position:.1f}" y1="{margin}" y2="{height - margin}" '
            'stroke="#dc2626" stroke-dasharray="4"/>'
        )
        parts.append(
            f'<text x="{position:.1f}" y="{margin - 8}" text-anchor="middle">'
            f"{suggestion:.2e}</text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"
