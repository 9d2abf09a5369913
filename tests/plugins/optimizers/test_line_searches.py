"""Optimizers that compute the loss again, where there is none to compute."""

from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_optimizers import GradientAccumulation, MultiOptimizer

BATCHES = [{"x": np.ones((4, 3), np.float32)}] * 4


class Line(fg.Module):
    weight: jax.Array
    optimizers: Any

    def __init__(self, optimizers: Any) -> None:
        self.weight = jnp.zeros(3)
        self.optimizers = optimizers

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean((batch["x"] @ self.weight - 1) ** 2))

    def configure_optimizers(self) -> Any:
        return self.optimizers


@pytest.mark.parametrize("make", [optax.lbfgs, lambda: optax.contrib.sophia(0.1)])
@pytest.mark.parametrize("plugin", [GradientAccumulation(2), MultiOptimizer()])
def test_line_search_of_phases_or_accumulated_steps_is_an_error_that_says_so(
    make: Any, plugin: Any
) -> None:
    optimizers = make()
    if isinstance(plugin, MultiOptimizer):
        optimizers = {"loss": fg.OptimizerSpec(make())}
    engine = fg.Engine(steps=4, plugins=[plugin], autoload=False)
    with pytest.raises(ConfigurationError, match="the optimizer needs more than this update has"):
        engine.fit(Line(optimizers), BATCHES)
