"""One optimizer after the other: the numbers of a plain loop that makes a new state for each."""

from collections.abc import Mapping
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_optimizers import (
    GradientAccumulation,
    MultiOptimizer,
    Phase,
    optimize_only,
    switch_optimizers,
)

GENERATOR = np.random.default_rng(0)
BATCHES = [
    {"x": x, "y": np.float32(x @ [1.0, -2.0, 0.5] + 0.3)}
    for x in GENERATOR.normal(size=(12, 8, 3)).astype(np.float32)
]


class Line(fg.Module):
    weight: jax.Array
    bias: jax.Array
    optimizer: Any

    def __init__(self, optimizer: Any, dtype: Any = jnp.float32) -> None:
        self.weight = jnp.ones(3)
        self.bias = jnp.zeros((), dtype)
        self.optimizer = optimizer

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        preds = batch["x"] @ self.weight + self.bias.astype(jnp.float32)
        return fg.Output(jnp.mean((preds - batch["y"]) ** 2))

    def configure_optimizers(self) -> Any:
        return self.optimizer


def compute_loss(params: Any, batch: Any) -> jax.Array:
    preds = batch["x"] @ params["weight"] + params["bias"]
    return jnp.mean((preds - batch["y"]) ** 2)


def train_by_hand(optimizers: Mapping[int, Any], batches: list[Any]) -> dict[str, jax.Array]:
    """A plain loop of optax, which makes the state of an optimizer where it begins."""
    params: Any = {"weight": jnp.ones(3), "bias": jnp.zeros(())}
    optimizer: Any = None
    state: Any = None
    for step, batch in enumerate(batches):
        if step in optimizers:
            optimizer = optax.with_extra_args_support(optimizers[step])
            state = optimizer.init(params)
        value, grads = jax.value_and_grad(compute_loss)(params, batch)
        updates, state = optimizer.update(
            grads,
            state,
            params,
            value=value,
            grad=grads,
            value_fn=lambda params, batch=batch: compute_loss(params, batch),
        )
        params = optax.apply_updates(params, updates)
    return params


OPTIMIZERS = {
    # Unsorted, and a schedule that begins with its optimizer.
    4: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)),
    0: optax.adam(optax.exponential_decay(0.3, 1, 0.7)),
    # Its state holds the parameters with which it begins.
    7: optax.contrib.schedule_free_sgd(0.2),
    np.int64(10): optax.adam(optax.exponential_decay(0.3, 1, 0.7)),
}


def test_each_optimizer_begins_where_the_previous_one_ends() -> None:
    model = Line(switch_optimizers(OPTIMIZERS))
    result = fg.Engine(steps=12, autoload=False).fit(model, BATCHES)
    expected = train_by_hand(OPTIMIZERS, BATCHES)
    np.testing.assert_allclose(result.module.weight, expected["weight"], rtol=1e-5)
    np.testing.assert_allclose(result.module.bias, expected["bias"], rtol=1e-5)
    # It took part: without the last one the weights are others.
    others = {start: part for start, part in OPTIMIZERS.items() if start < 10}
    assert np.abs(train_by_hand(others, BATCHES)["weight"] - result.module.weight).max() > 1e-3


@pytest.mark.full
def test_a_line_search_after_adam_converges_as_in_a_plain_loop() -> None:
    optimizers = {0: optax.adam(0.1), 5: optax.lbfgs()}
    batches = BATCHES[:1] * 12
    result = fg.Engine(steps=12, autoload=False).fit(Line(switch_optimizers(optimizers)), batches)
    expected = train_by_hand(optimizers, batches)
    np.testing.assert_allclose(result.module.weight, expected["weight"], rtol=1e-4)
    adam = train_by_hand({0: optax.adam(0.1)}, batches)
    assert compute_loss(expected, batches[0]) < 0.01 * compute_loss(adam, batches[0])


@pytest.mark.full
def test_optimizers_whose_updates_have_other_dtypes_keep_their_precision() -> None:
    wide = optax.chain(optax.scale_by_adam(mu_dtype=jnp.float32), optax.scale(-0.1))
    switched = switch_optimizers({0: wide, 6: optax.sgd(0.1)})
    engine = fg.Engine(steps=6, autoload=False)
    result = engine.fit(Line(switched, jnp.bfloat16), BATCHES)
    expected = engine.fit(Line(wide, jnp.bfloat16), BATCHES)
    np.testing.assert_allclose(result.module.weight, expected.module.weight, rtol=1e-5)
    assert result.module.bias == expected.module.bias
    assert result.module.bias.dtype == jnp.bfloat16


@pytest.mark.full
def test_what_one_optimizer_does_not_update_the_next_one_may() -> None:
    parts: Any = {True: optax.sgd(0.1), False: optax.set_to_zero()}
    bias_only = optax.partition(parts, fg.select("bias"))
    optimizer = switch_optimizers({0: bias_only, 2: optax.sgd(0.1)})
    weights = {}
    for steps in (2, 3):
        engine = fg.Engine(steps=steps, autoload=False)
        weights[steps] = engine.fit(Line(optimizer), BATCHES).module.weight
    np.testing.assert_array_equal(weights[2], 1)
    assert np.all(np.asarray(weights[3]) != 1)
    engine = fg.Engine(steps=3, autoload=False)
    frozen = engine.fit(Line(optimize_only(optimizer, "bias")), BATCHES).module
    np.testing.assert_array_equal(frozen.weight, 1)
    assert frozen.bias != 0


@pytest.mark.full
def test_updates_are_counted_and_not_batches() -> None:
    optimizer = switch_optimizers({0: optax.sgd(0.1), 2: optax.sgd(0.0)})
    engine = fg.Engine(steps=12, plugins=[GradientAccumulation(3, "steps")], autoload=False)
    result = engine.fit(Line(optimizer), BATCHES)
    short = fg.Engine(steps=6, plugins=[GradientAccumulation(3, "steps")], autoload=False)
    expected = short.fit(Line(optax.sgd(0.1)), BATCHES)
    np.testing.assert_array_equal(result.module.weight, expected.module.weight)


@pytest.mark.parametrize(
    ("optimizers", "message"),
    [
        ({}, "give optimizers by the number of updates"),
        ([optax.sgd(0.1)], "give optimizers by the number of updates"),
        ({5: optax.sgd(0.1)}, "no optimizer is there before update 5"),
        ({0: optax.sgd(0.1), -1: optax.sgd(0.1)}, "-1 is not a number of updates"),
        ({0: optax.sgd(0.1), 1.5: optax.sgd(0.1)}, "1.5 is not a number of updates"),
        ({True: optax.sgd(0.1)}, "True is not a number of updates"),
        ({0: 0.1}, "the optimizer from 0 on is 0.1; give one of "),
        ({0: optimize_only(optax.sgd(0.1), "bias")}, "as optimize_only does, goes around all"),
    ],
)
def test_invalid_optimizers_are_refused(optimizers: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        switch_optimizers(optimizers)


def test_an_update_without_parameters_is_refused() -> None:
    optimizer = switch_optimizers({0: optax.sgd(0.1), 3: optax.sgd(0.2)})
    params = {"weight": jnp.ones(2)}
    with pytest.raises(ConfigurationError, match="give the parameters"):
        optimizer.update(params, optimizer.init(params))


@pytest.mark.full
def test_the_rate_of_an_optimizer_that_is_over_is_not_logged() -> None:
    """A phase logs that of an optimizer which stores it, and does not know which one is in use."""
    make = optax.inject_hyperparams(optax.sgd)
    optimizer = switch_optimizers({0: make(learning_rate=0.1), 2: make(learning_rate=0.01)})
    for phase, expected in ((Phase(make(learning_rate=0.5)), 0.5), (Phase(optimizer), None)):
        engine = fg.Engine(steps=4, plugins=[MultiOptimizer(loss=phase)], autoload=False)
        metrics = engine.fit(Line(None), BATCHES).metrics["train"]
        assert metrics.get("loss/learning_rate") == expected
