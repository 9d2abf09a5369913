"""Predictions of data without labels, against NumPy."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, DataError, ModelError
from jaxtyping import Array, Float

WEIGHT = np.asarray([[1, -2, 0.5], [0, 3, -1]], np.float32)
INPUTS = np.random.default_rng(3).normal(size=(5, 3)).astype(np.float32)
TARGETS = np.random.default_rng(4).normal(size=(5, 2)).astype(np.float32)
ENGINE = fg.Engine(steps=1)


class Net(eqx.Module):
    """A linear map of one example."""

    weight: jax.Array

    def __call__(self, x: Any) -> Any:
        return self.weight @ x


def squared_error(preds: Any, batch: Any) -> Any:
    return ((preds - batch[1]) ** 2).sum(-1)


def make_task(**options: Any) -> fg.Task:
    """A task whose loss reads labels, and whose metrics do."""
    options = {"metrics": {"error": squared_error}} | options
    net = Net(jnp.asarray(WEIGHT))
    return fg.Task(net, loss=squared_error, optimizer=optax.sgd(0.1), **options)


class Regression(fg.Module):
    """Labels are read by `training_step` alone."""

    weight: jax.Array = eqx.field(default_factory=lambda: jnp.asarray(WEIGHT))

    def forward(self, batch: Any, ctx: fg.Context) -> Any:
        assert ctx.training == fg.is_training()
        return batch["x"] @ self.weight.T

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        error = (self.forward(batch, ctx) - batch["y"]) ** 2
        return fg.Output(error.sum(-1).mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


@pytest.mark.parametrize(
    "data",
    [
        lambda: fg.ArrayData((INPUTS,), 2),
        lambda: fg.ArrayData((INPUTS,), 2, remainder="pad", on_device=True),
        lambda: [(INPUTS[:3],), (INPUTS[3:],)],
        lambda: fg.ArrayData((INPUTS, TARGETS), 2),
    ],
)
def test_a_task_predicts_with_its_forward_function_alone(data: Callable[[], Any]) -> None:
    np.testing.assert_allclose(ENGINE.predict(make_task(), data()), INPUTS @ WEIGHT.T, rtol=1e-5)


def test_a_task_with_a_forward_function_predicts_without_labels() -> None:
    def forward(model: Any, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(preds=jax.vmap(model)(batch["x"]), metrics={"one": jnp.ones(())})

    preds = ENGINE.predict(make_task(forward=forward), fg.ArrayData({"x": INPUTS}, 2))
    np.testing.assert_allclose(preds, INPUTS @ WEIGHT.T, rtol=1e-5)
    half = fg.ArrayData((jnp.asarray(INPUTS, jnp.bfloat16),), 5)
    preds = ENGINE.predict(make_task(), half)
    exact = np.asarray(half.arrays[0], np.float32) @ WEIGHT.T
    np.testing.assert_allclose(preds, exact, rtol=1e-5)


def test_training_and_prediction_share_forward() -> None:
    result = ENGINE.fit(Regression(), fg.ArrayData({"x": INPUTS, "y": TARGETS}, 5))
    gradient = 2 * (INPUTS @ WEIGHT.T - TARGETS).T @ INPUTS / len(INPUTS)
    weight = WEIGHT - 0.1 * gradient
    np.testing.assert_allclose(result.module.weight, weight, rtol=1e-5)
    preds = ENGINE.predict(result, fg.ArrayData({"x": INPUTS}, 2, remainder="pad"))
    np.testing.assert_allclose(preds, INPUTS @ weight.T, rtol=1e-4, atol=1e-5)


def test_a_call_that_takes_the_batch_predicts_as_forward_does() -> None:
    class Calling(Regression):
        forward = None  # pyright: ignore

        def __call__(self, batch: Any) -> Any:
            return batch["x"] @ self.weight.T

    class Compiled(Regression):
        @eqx.filter_jit
        def forward(self, batch: Float[Array, "batch 3"]) -> Any:  # pyright: ignore
            return fg.Output(preds=batch @ self.weight.T)

    preds = ENGINE.predict(Calling(), fg.ArrayData({"x": INPUTS}, 2))
    np.testing.assert_allclose(preds, INPUTS @ WEIGHT.T, rtol=1e-5)
    preds = ENGINE.predict(Compiled(), fg.ArrayData(INPUTS, 2))
    np.testing.assert_allclose(preds, INPUTS @ WEIGHT.T, rtol=1e-5)
    with pytest.raises(DataError, match=r"batch is float32\[2,2\]; .*forward expects Float"):
        ENGINE.predict(Compiled(), fg.ArrayData(TARGETS, 2))


def test_methods_of_one_example_and_fields_are_not_taken_for_forward() -> None:
    class Example(Regression):
        def __call__(self, x: Any) -> Any:
            raise AssertionError

        def forward(self, x: Any) -> Any:  # pyright: ignore
            return self.weight @ x

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(preds=jax.vmap(self.forward)(batch["x"]))

    class Field(Example):
        forward: Any = eqx.field(static=True, default=lambda self, batch: batch)  # pyright: ignore

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(preds=batch["x"] @ self.weight.T)

    for module in (Example(), Field()):
        preds = ENGINE.predict(module, fg.ArrayData({"x": INPUTS}, 2))
        np.testing.assert_allclose(preds, INPUTS @ WEIGHT.T, rtol=1e-5)


def test_a_validation_step_that_misses_labels_says_how_to_predict() -> None:
    class Whole(Regression):
        forward = None  # pyright: ignore

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            preds = batch["x"] @ self.weight.T
            return fg.Output(((preds - batch["y"]) ** 2).mean(), preds=preds)

    with pytest.raises(KeyError) as caught:
        ENGINE.predict(Whole(), fg.ArrayData({"x": INPUTS}, 2))
    assert caught.value.__notes__[0] == (
        "predict ran the validation_step of Whole, which may read labels: define forward(self, "
        "batch, ctx) and call it in training_step, or predict_step, for batches without labels"
    )


def test_a_bare_array_as_data_says_what_it_wants() -> None:
    for call in (ENGINE.fit, ENGINE.evaluate, ENGINE.predict):
        for array in (INPUTS, jnp.asarray(INPUTS)):
            with pytest.raises(
                ConfigurationError, match=r"use fg\.ArrayData\(arrays, batch_size\), where"
            ):
                call(make_task(), array)
        with pytest.raises(ModelError, match=r"one array, float32\[2,3\].*fg\.ArrayData\(\(x,\)"):
            call(make_task(), fg.ArrayData(INPUTS, 2))
