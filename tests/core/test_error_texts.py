"""Strings of errors: they say what differs, and what may be written instead."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import DataError, ModelError
from jaxtyping import Array, Float

X = np.ones((4, 3), np.float32)


class Line(fg.Module):
    weight: jax.Array
    size: int = eqx.field(static=True)

    def __init__(self, size: int = 3) -> None:
        self.weight = jnp.ones(3)
        self.size = size

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean(batch @ self.weight))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def fit(model: Any, batches: Any = (X,)) -> fg.FitResult:
    return fg.Engine(epochs=1, autoload=False).fit(model, list(batches))


def annotate(axes: str) -> Any:
    class Annotated(Line):
        def training_step(self, batch: Float[Array, axes], ctx: fg.Context) -> fg.Output:
            return fg.Output(jnp.mean(batch @ self.weight))

        def predict_step(self, batch: Float[Array, axes], ctx: fg.Context) -> Any:
            return batch @ self.weight

    return Annotated


def test_undeclared_spec_is_an_error_that_names_both_specs() -> None:
    batches = [fg.Batch(X, spec="photo"), fg.Batch(X, spec="sketch")]
    with pytest.raises(DataError) as caught:
        fit(Line(), batches)
    assert "sketch" in str(caught.value) and "photo" in str(caught.value)
    words = r"float32\[4,3\] of spec 'sketch', not float32\[4,3\] of spec 'photo'"
    with pytest.raises(DataError, match=words):
        fg.Engine(steps=1, autoload=False).evaluate(Line(), batches)


def test_batches_of_equal_arrays_in_other_containers_are_told_apart() -> None:
    class Stacked(Line):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(jnp.mean(batch[0] @ self.weight))

    for call in (fg.Engine(epochs=1).fit, fg.Engine(epochs=1).evaluate):
        with pytest.raises(DataError, match=r"\(\*,\).*not .*\[\*\]"):
            call(Stacked(), [[X], (X,)])  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("arrays", [{"c": X[:0]}, {"c": X[:0], "d": X}, {"d": X, "c": X[:0]}])
def test_empty_array_of_data_is_named_once(arrays: Any) -> None:
    with pytest.raises(DataError) as caught:
        fg.ArrayData(arrays, batch_size=2)
    text = str(caught.value)
    assert text == "ArrayData: data['c'] has 0 examples; give arrays of at least one."


@pytest.mark.parametrize("axes", ["b {self.size}", "b {self.size+1}-1", "b n"])
def test_axes_of_a_batch_may_be_computed_from_the_module(axes: str) -> None:
    model = annotate(axes)()
    assert fit(model).state.step == 1
    engine = fg.Engine(steps=1, autoload=False)
    assert np.isfinite(engine.evaluate(model, [X])["loss"])
    np.testing.assert_allclose(engine.predict(model, [X]), np.full(4, 3.0))


def test_axis_that_is_computed_from_the_module_and_differs_is_an_error() -> None:
    model = annotate("b {self.size}")(5)
    engine = fg.Engine(steps=1, autoload=False)
    for call in (engine.fit, engine.evaluate, engine.predict):
        with pytest.raises(DataError, match=r'expects Float\[Array, "b {self.size}"\]'):
            call(model, [X])


@pytest.mark.parametrize("axes", ["n+1 3", "2*d d", "b self.size"])
def test_axis_that_nothing_binds_is_an_error_that_names_it(axes: str) -> None:
    axis = next(axis for axis in axes.split() if set(axis) & set("+*."))
    with pytest.raises(ModelError) as caught:
        fit(annotate(axes)())
    assert f"is annotated with the axis {axis!r}" in str(caught.value)
    assert "{self.field}" in str(caught.value)


class Square(Line):
    double: Float[Array, "2*d"]
    single: Float[Array, "d"]
    sized: Float[Array, "{self.size} d+1"]

    def __init__(self, double: int, single: int, sized: tuple[int, int]) -> None:
        super().__init__()
        self.double, self.single = jnp.ones(double), jnp.ones(single)
        self.sized = jnp.ones(sized)


def test_axes_of_fields_may_be_computed_from_those_of_other_fields() -> None:
    make: Callable[..., Square] = Square
    assert fit(make(4, 2, (3, 3))).state.step == 1
    with pytest.raises(ModelError, match=r'double is float32\[5\].*"2\*d"'):
        fit(make(5, 2, (3, 3)))
    with pytest.raises(ModelError, match=r"sized is float32\[2,3\]"):
        fit(make(4, 2, (2, 3)))
