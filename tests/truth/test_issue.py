"""What a loss is a mean over: cases that users of other frameworks reported, with values worked out
by hand."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import fulgurite as fg
import fulgurite_losses
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import DataError
from fulgurite.metrics import Mean
from fulgurite_keys import Losses, SoftmaxCrossEntropy
from fulgurite_optimizers import GradientAccumulation, MultiOptimizer, Phase

Loss = Callable[[Any, Any], Any]


class Weight(fg.Module):
    """A number that each value of the batch is multiplied with: the gradient of a mean of the
    products is that of the values."""

    weight: jax.Array
    loss: Loss

    def training_step(self, batch: Any, ctx: fg.Context) -> Any:
        return self.loss(self.weight * batch["x"], batch)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


def say_weight(values: Any, batch: Any) -> fg.Output:
    """As most write it: NaN without tokens."""
    mask = batch["mask"]
    return fg.Output(jnp.sum(values * mask) / jnp.sum(mask), weight=jnp.sum(mask))


def return_mean(values: Any, batch: Any) -> Mean:
    return Mean.from_values(values, batch["mask"])


def compute_mean(values: Any, batch: Any) -> Any:
    return Mean.from_values(values, batch["mask"]).compute()


def call_loss(values: Any, batch: Any) -> Any:
    targets = jnp.full_like(values, -100)
    return fulgurite_losses.absolute_error(values, targets, mask=batch["mask"])


def call_weighted_loss(values: Any, batch: Any) -> Any:
    targets = jnp.full_like(values, -100)
    weight = batch["mask"].astype(jnp.float32)
    return fulgurite_losses.absolute_error(
        values, targets, weight=weight, reduction="weighted_mean"
    )


LOSSES = [say_weight, return_mean, compute_mean, call_loss, call_weighted_loss]

ONE_AND_THREE = {
    "x": np.array([[4, 9, 9], [0, 0, 0]], np.float32),
    "mask": np.array([[True, False, False], [True, True, True]]),
}
"""Two examples of one and three tokens. The mean over tokens is 1, that of the examples' means 2."""


def train(loss: Loss, batches: Any, *plugins: Any) -> float:
    """Return the weight after a fit that begins with 0: minus the sum of the gradients."""
    engine = fg.Engine(steps=len(batches), autoload=False, plugins=plugins)
    return float(engine.fit(Weight(jnp.zeros(()), loss), batches).module.weight)


def split(batch: Any, size: int) -> list[Any]:
    """Return a batch in parts of some examples each."""
    return [
        {name: array[start : start + size] for name, array in batch.items()}
        for start in range(0, len(batch["x"]), size)
    ]


@pytest.mark.parametrize("loss", LOSSES)
def test_two_examples_of_one_and_three_tokens_give_the_gradient_of_the_whole_batch(
    loss: Loss,
) -> None:
    assert train(loss, [ONE_AND_THREE]) == -1.0
    assert train(loss, [ONE_AND_THREE], GradientAccumulation(2)) == -1.0
    assert train(loss, split(ONE_AND_THREE, 1), GradientAccumulation(2, "steps")) == -1.0


@pytest.mark.full
@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 6))])
@pytest.mark.parametrize("loss", LOSSES)
def test_microbatches_without_a_token_count_for_nothing(loss: Loss, n: int) -> None:
    """Of six examples, the second, third, fifth and sixth have none: with n of 3 and 6 whole
    microbatches."""
    mask = np.array([[1, 1], [0, 0], [0, 0], [1, 0], [0, 0], [0, 0]], bool)
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    batch = {"x": x, "mask": mask}
    expected = pytest.approx(-x[mask].mean(), rel=1e-6)
    assert train(loss, [batch], GradientAccumulation(n)) == expected
    assert train(loss, split(batch, 6 // n), GradientAccumulation(n, "steps")) == expected


@pytest.mark.parametrize("mode", ["microbatch", "steps"])
def test_a_phase_accumulates_by_weight(mode: Any) -> None:
    class Two(fg.Module):
        first: jax.Array
        second: jax.Array

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            losses = {
                "first": Mean.from_values(self.first * batch["x"], batch["mask"]),
                "second": (self.second * batch["x"]).mean(),
            }
            return fg.Output(losses=losses)

    phases: dict[str, Any] = {
        name: Phase(optax.sgd(1.0), name, accumulate=GradientAccumulation(2, mode))
        for name in ("first", "second")
    }
    batches = [ONE_AND_THREE] if mode == "microbatch" else split(ONE_AND_THREE, 1)
    engine = fg.Engine(steps=len(batches), autoload=False, plugins=[MultiOptimizer(**phases)])
    module = engine.fit(Two(jnp.zeros(()), jnp.zeros(())), batches).module
    np.testing.assert_allclose([module.first, module.second], [-1, -22 / 6], rtol=1e-6)


@pytest.mark.parametrize("sizes", [(3, 1), (1, 3), (2, 2)])
def test_steps_of_unequal_batches_count_by_their_examples(sizes: tuple[int, int]) -> None:
    """The loss is a plain mean, which weighs as much as its batch has examples."""
    x = np.array([1, 2, 3, 10], np.float32)
    batches = [{"x": part} for part in np.split(x, [sizes[0]])]
    loss = train(lambda values, batch: values.mean(), batches, GradientAccumulation(2, "steps"))
    assert loss == pytest.approx(-4)


def make_tokens() -> dict[str, np.ndarray]:
    """Return eight examples of no to three tokens."""
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(8, 3)).astype(np.float32),
        "mask": np.arange(3) < np.array([3, 1, 0, 2, 0, 0, 1, 3])[:, None],
    }


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_of_an_evaluation_does_not_depend_on_the_batch_size(loss: Loss) -> None:
    """Batches of 2 and 1 include some without a token."""
    tokens = make_tokens()
    offset = 100 if loss in (call_loss, call_weighted_loss) else 0
    expected = pytest.approx(tokens["x"][tokens["mask"]].mean() + offset, rel=1e-6)
    engine = fg.Engine(steps=1, autoload=False)
    model = Weight(jnp.ones(()), loss)
    values = {size: engine.evaluate(model, split(tokens, size))["loss"] for size in (8, 4, 2, 1)}
    assert values == dict.fromkeys(values, expected)


@pytest.mark.parametrize("loss", [return_mean, compute_mean, call_loss])
def test_losses_of_an_evaluator_do_not_depend_on_the_batch_size(loss: Loss) -> None:
    class Identity(Weight):
        def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(preds=batch["x"])

    tokens = make_tokens()
    offset = 100 if loss is call_loss else 0
    expected = pytest.approx(tokens["x"][tokens["mask"]].mean() + offset, rel=1e-6)
    engine = fg.Engine(steps=1, autoload=False)
    for size in (8, 2, 1):
        data = split(tokens, size)
        values = engine.evaluate(Identity(jnp.ones(()), loss), data, losses={"loss": loss})
        assert values["loss"] == expected


@pytest.mark.parametrize("size", [8, 3, 1])
def test_a_keyed_loss_knows_its_mask(size: int) -> None:
    class Classifier(fg.Module):
        scale: jax.Array

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(preds=self.scale * batch["logits"])

    random = np.random.default_rng(1)
    logits = random.normal(size=(8, 3, 5)).astype(np.float32)
    labels = random.integers(0, 5, (8, 3)).astype(np.int32)
    tokens = {**make_tokens(), "logits": logits, "label": labels}
    entropy = SoftmaxCrossEntropy("preds", "batch.label", mask="batch.mask")
    engine = fg.Engine(steps=1, autoload=False, plugins=[Losses(ce=entropy)])
    values = engine.evaluate(Classifier(jnp.ones(())), split(tokens, size))
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    losses = -np.log(np.take_along_axis(chances, labels[..., None], -1)[..., 0])
    expected = losses[tokens["mask"]].mean()
    np.testing.assert_allclose([values["loss"], values["ce"]], expected, rtol=1e-5)


def test_a_metric_window_weighs_the_loss_and_bare_metrics_by_what_the_output_says() -> None:
    """The weight is 0 in the third step, where both are NaN."""

    class Measured(fg.Module):
        weight: jax.Array

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            size = jnp.sum(batch["mask"])
            mean = jnp.sum(batch["x"] * batch["mask"]) / size
            return fg.Output(self.weight * mean, weight=size, metrics={"twice": 2 * mean})

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(0.0)

    tokens = make_tokens()
    engine = fg.Engine(steps=4, autoload=False, log_every=4)
    result = engine.fit(Measured(jnp.ones(())), split(tokens, 2))
    mean = tokens["x"][tokens["mask"]].mean()
    metrics = result.metrics["train"]
    np.testing.assert_allclose([metrics["loss"], metrics["twice"]], [mean, 2 * mean], rtol=1e-5)


FOREIGN = {
    "class_weights": lambda x: {"class_weights": np.ones(3, np.float32), "x": x},
    "edges": lambda x: {"edge_index": np.zeros((2, 7), np.int32), "x": x},
    "tuple": lambda x: (np.zeros((5, 2), np.float32), x),
}
"""Batches that begin with an array of another length than the number of examples."""


class Means(fg.Module):
    """Measures the mean of the last array of the batch, and says its weight if it is to."""

    weight: jax.Array
    says_weight: bool

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        x = jax.tree.leaves(batch)[-1]
        weight = len(x) if self.says_weight else None
        return fg.Output(self.weight * x.mean(), weight=weight)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.0)


@pytest.mark.parametrize("structure", FOREIGN)
def test_the_number_of_examples_is_never_that_of_a_foreign_array(structure: str) -> None:
    """Eight examples with the loss 0 and two with the loss 100 have the mean 20; by arrays of equal
    length it would be 50."""
    pack = FOREIGN[structure]
    arrays = [np.zeros(8, np.float32), np.full(2, 100, np.float32)]
    data = [pack(x) for x in arrays]
    counted = [fg.Batch(pack(x), num_examples=len(x)) for x in arrays]
    engine = fg.Engine(steps=2, autoload=False, log_every=2)
    for model, batches in (
        (Means(jnp.ones(()), True), data),
        (Means(jnp.ones(()), False), counted),
    ):
        assert engine.evaluate(model, batches)["loss"] == pytest.approx(20)
        assert engine.fit(model, batches).metrics["train"]["loss"] == pytest.approx(20)
    silent = Means(jnp.ones(()), False)
    for run in (engine.evaluate, engine.fit):
        with pytest.raises(DataError, match=r"begin with different lengths .*num_examples="):
            run(silent, data)


def fit_task(
    loss: Callable[..., Any], data: fg.ArrayData, *plugins: Any, weight: float = 1.0
) -> tuple[float, float]:
    """Return the weight after an epoch from 0 on, and the loss of an evaluation at 1."""

    class Scale(eqx.Module):
        weight: jax.Array

        def __call__(self, x: Any) -> Any:
            return self.weight * x

    def make(value: float) -> fg.Task:
        return fg.Task(
            Scale(jnp.float32(value)), loss=loss, optimizer=optax.sgd(1.0), weight=weight
        )

    engine = fg.Engine(epochs=1, autoload=False, plugins=plugins)
    evaluated = engine.evaluate(make(1.0), data)["loss"]
    return float(engine.fit(make(0.0), data).module.model.weight), evaluated


@pytest.mark.parametrize(
    ("mode", "batch_size"), [(None, 8), ("microbatch", 8), ("steps", 4), ("steps", 2)]
)
@pytest.mark.parametrize("form", ["array", "masked", "mean"])
def test_a_task_averages_over_what_its_loss_is_a_mean_of(
    form: str, mode: Any, batch_size: int
) -> None:
    """Five examples and padding; a factor for the loss leaves its weight as it is."""
    random = np.random.default_rng(2)
    x = random.normal(size=(5, 3)).astype(np.float32)
    tokens = np.arange(3) < np.array([3, 0, 1, 2, 1])[:, None]
    data = fg.ArrayData((x, tokens), batch_size, remainder="pad")
    losses: dict[str, Callable[..., Any]] = {
        "array": lambda preds, batch: preds.mean(1),
        "masked": lambda preds, batch, mask: fulgurite_losses.absolute_error(
            preds, jnp.full_like(preds, -100), mask=batch[1] & mask[:, None]
        ),
        "mean": lambda preds, batch, mask: Mean.from_values(preds, batch[1] & mask[:, None]),
    }
    mean = x.mean() if form == "array" else x[tokens].mean()
    plugins = [] if mode is None else [GradientAccumulation(4, mode)]
    weight, evaluated = fit_task(losses[form], data, *plugins, weight=0.5)
    assert weight == pytest.approx(-0.5 * mean, rel=1e-5)
    offset = 50 if form == "masked" else 0
    assert evaluated == pytest.approx(0.5 * mean + offset, rel=1e-5)
