"""Steps that do not use the mask of a padded batch are refused or told."""

import warnings
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ModelError

RNG = np.random.default_rng(0)
ARRAYS = {"x": RNG.normal(size=(10, 3)).astype(np.float32), "y": RNG.integers(0, 3, 10)}
WEIGHT = RNG.normal(size=(3, 3)).astype(np.float32)


class Classifier(fg.Module):
    """One linear layer; `reduce` makes the loss of the losses of the examples."""

    weight: jax.Array
    reduce: str = eqx.field(static=True)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        logits = batch["x"].astype(self.weight.dtype) @ self.weight
        logits = jnp.real(logits)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return getattr(self, self.reduce)(losses, batch, ctx)

    validation_step = training_step

    def bare(self, losses: Any, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(losses.mean())

    def bare_mean(self, losses: Any, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(fg.metrics.Mean.from_values(losses))

    def ignored_in_jit(self, losses: Any, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jax.jit(lambda losses, mask: losses.mean())(losses, ctx.mask))

    def masked(self, losses: Any, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(fg.metrics.Mean.from_values(losses, ctx.mask))

    def masked_by_hand(self, losses: Any, batch: Any, ctx: fg.Context) -> fg.Output:
        assert ctx.mask is not None
        total = jax.jit(lambda losses, mask: jnp.where(mask, losses, 0).sum())(losses, ctx.mask)
        return fg.Output(total / ctx.mask.sum())

    def masked_by_zeros(self, losses: Any, batch: Any, ctx: fg.Context) -> fg.Output:
        is_real = (batch["x"] != 0).any(-1)
        return fg.Output((losses * is_real).sum() / is_real.sum())

    def bare_metric(self, losses: Any, batch: Any, ctx: fg.Context) -> fg.Output:
        return self.masked(losses, batch, ctx).replace(metrics={"plain": losses.mean()})

    def random(self, losses: Any, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output((losses * jax.random.uniform(ctx.key(), losses.shape)).mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def make(reduce: str, weight: Any = WEIGHT) -> Classifier:
    return Classifier(jnp.asarray(weight), reduce)


def pad(num_examples: int = 10, batch_size: int = 4, **options: Any) -> fg.ArrayData:
    arrays = {name: array[:num_examples] for name, array in ARRAYS.items()}
    return fg.ArrayData(arrays, batch_size, remainder="pad", **options)


def losses_by_hand(x: Any, y: Any) -> Any:
    logits = x.astype(np.float64) @ WEIGHT
    return np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]


@pytest.mark.variants("full")
@pytest.mark.parametrize(
    ("reduce", "weight"),
    [
        ("bare", WEIGHT),
        # Each example and padding have the same loss, and other gradients.
        ("bare", np.zeros((3, 3), np.float32)),
        ("bare", WEIGHT.astype(jnp.bfloat16)),
        ("bare", WEIGHT.astype(np.complex64)),
        ("bare_mean", WEIGHT),
        ("ignored_in_jit", WEIGHT),
    ],
)
def test_training_is_refused_where_padding_changes_the_gradient(reduce: str, weight: Any) -> None:
    with pytest.raises(ModelError, match=r"does not use ctx.mask for the loss: padding changes"):
        fg.Engine(steps=1).fit(make(reduce, weight), pad())


@pytest.mark.full
def test_the_error_says_what_padding_does_to_the_loss() -> None:
    losses = losses_by_hand(ARRAYS["x"][:4], ARRAYS["y"][:4])
    padded = (losses.sum() + 4 * np.log(3)) / 8  # the logits of a row of zeros are zeros
    engine = fg.Engine(steps=1)
    for _ in range(2):  # the same engine refuses it again
        with pytest.raises(ModelError, match="of 4 examples is") as error:
            engine.fit(make("bare"), pad(on_device=True))
        assert f"is {losses.mean():.4f}" in str(error.value)
        assert f"of padding {padded:.4f}" in str(error.value)


@pytest.mark.parametrize("reduce", ["masked", "masked_by_hand", "masked_by_zeros"])
def test_a_step_in_which_padding_does_not_count_is_neither_refused_nor_told(reduce: str) -> None:
    engine = fg.Engine(steps=3)
    result = engine.fit(make(reduce), pad())
    assert result.messages == []
    expected = losses_by_hand(ARRAYS["x"], ARRAYS["y"]).mean()
    assert engine.evaluate(make(reduce), pad())["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_source_without_any_padding_is_not_tried() -> None:
    assert fg.Engine(steps=1).fit(make("bare"), pad(8)).messages == []


@pytest.mark.full
def test_a_metric_in_which_padding_counts_is_told() -> None:
    (message,) = fg.Engine(steps=1).fit(make("bare_metric"), pad()).messages
    assert "does not use ctx.mask for the metric 'plain'" in message


@pytest.mark.full
def test_a_random_loss_that_does_not_use_the_mask_is_told() -> None:
    (message,) = fg.Engine(steps=1).fit(make("random"), pad()).messages
    assert "does not use ctx.mask for the loss: it is random" in message


def test_a_training_step_of_an_engine_may_use_the_mask_itself_and_is_told_only() -> None:
    class Masking(fg.Engine):
        def train_step(self, state: Any, batch: Any, ctx: fg.Context, update_rule: Any) -> Any:
            return update_rule(self.forward, state, batch, ctx)

    (message,) = Masking(steps=1).fit(make("bare"), pad()).messages
    assert "does not use ctx.mask for the loss: the loss of 4 examples is" in message


@pytest.mark.full
@pytest.mark.parametrize("num_examples", [9, 10])
def test_an_evaluation_in_which_padding_counts_is_told_once(num_examples: int) -> None:
    engine = fg.Engine()
    with pytest.warns(UserWarning, match=r"padding counts in the results of evaluation 'test'"):
        engine.evaluate(make("bare"), pad(num_examples))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.evaluate(make("bare"), pad(num_examples))
        engine.evaluate(make("bare"), pad(8))
        fg.Engine().evaluate(make("masked"), pad(num_examples))


@pytest.mark.full
def test_masked_batches_of_any_source_are_tried() -> None:
    rows = {name: array[:4] for name, array in ARRAYS.items()}
    batches = [fg.Batch(rows, np.array([True, True, True, False]))]
    with pytest.raises(ModelError, match="padding changes the gradient"):
        fg.Engine(steps=1).fit(make("bare"), batches)
