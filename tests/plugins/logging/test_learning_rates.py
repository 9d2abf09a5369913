"""The learning rate of any schedule of optax is logged."""

from typing import Any

import fulgurite as fg
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite_logging import LearningRateMonitor
from fulgurite_logging.schedules import find_rates
from fulgurite_testing import TinyModel, tiny_data

SCHEDULE = optax.linear_schedule(1.0, 0.0, 10)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (optax.adam(SCHEDULE), {"": 0.8}),
        (optax.sgd(0.25, momentum=0.9), {"": 0.25}),
        (optax.chain(optax.clip(1.0), optax.adamw(SCHEDULE)), {"": 0.8}),
        (
            optax.chain(
                optax.masked(optax.adam(SCHEDULE), {"a": True, "b": False}),
                optax.masked(optax.sgd(0.5), {"a": False, "b": True}),
            ),
            {"": 0.8, "2": 0.5},
        ),
        # As the documentation of optax writes it, the other way round, and in groups.
        (optax.chain(optax.scale_by_schedule(SCHEDULE), optax.scale(-1.0)), {"": 0.8}),
        (optax.chain(optax.scale(-0.5), optax.trace(0.9), optax.scale(0.25)), {"": 0.125}),
        (
            optax.chain(
                optax.partition(
                    {"head": optax.scale_by_schedule(SCHEDULE), "body": optax.scale_by_adam()},
                    {"a": "head", "b": "body"},
                ),
                optax.scale(-1.0),
            ),
            {"head": 0.8},
        ),
        (optax.adafactor(1e-3), {"": 1e-3}),
        (optax.adafactor(SCHEDULE), {"": 0.8}),
        (optax.sgd(1.0), {"": 1.0}),
        (optax.sgd(np.float32(0.25)), {"": 0.25}),  # pyright: ignore[reportArgumentType]
        (optax.sgd(jnp.float32(0.25)), {"": 0.25}),
        (optax.chain(optax.scale_by_adam(), optax.scale(0.5)), {}),
        (optax.masked(optax.adam(SCHEDULE), {"a": True, "b": False}), {"": 0.8}),
        (
            optax.partition(
                {"head": optax.adam(SCHEDULE), "body": optax.sgd(0.125)}, {"a": "head", "b": "body"}
            ),
            {"head": 0.8, "body": 0.125},
        ),
        (optax.scale_by_adam(), {}),
    ],
)
def test_rates_of_optimizers(optimizer: Any, expected: dict[str, float]) -> None:
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    state = optimizer.init(params)
    for _ in range(3):
        _, state = optimizer.update(params, state, params)
    rates = find_rates(optimizer, state)
    assert {name: pytest.approx(float(rate)) for name, rate in rates.items()} == expected


def test_the_rate_of_a_schedule_is_logged_without_injecting_it() -> None:
    class Scheduled(TinyModel):
        def configure_optimizers(self) -> Any:
            return optax.adam(SCHEDULE)

    engine = fg.Engine(steps=4, log_every=1, autoload=False, plugins=[LearningRateMonitor()])
    result = engine.fit(Scheduled, tiny_data())
    np.testing.assert_allclose(
        result.history["train/learning_rate/default"], [1.0, 0.9, 0.8, 0.7], rtol=1e-6
    )
