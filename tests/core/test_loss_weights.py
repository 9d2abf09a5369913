"""What a loss is a mean over: what a step may say, what is refused, and what is tried."""

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
from fulgurite_optimizers import GradientAccumulation

Loss = Callable[[jax.Array, Any, fg.Context], Any]

X = np.array([[1, 2, 0], [3, 0, 0], [4, 5, 6], [7, 8, 0], [9, 0, 0], [1, 1, 1]], np.float32)


class Scaled(fg.Module):
    """A weight whose loss is a function of it and of the batch."""

    weight: jax.Array
    loss: Loss = eqx.field(static=True)

    def training_step(self, batch: Any, ctx: fg.Context) -> Any:
        return self.loss(self.weight, batch, ctx)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def fit(loss: Loss, data: Any, weight: float = 1.0, **settings: Any) -> fg.FitResult:
    settings = {"steps": 1, "log_every": 1} | settings
    return fg.Engine(autoload=False, **settings).fit(Scaled(jnp.float32(weight), loss), data)


def evaluate(loss: Loss, data: Any, **options: Any) -> dict[str, Any]:
    engine = fg.Engine(autoload=False)
    return engine.evaluate(Scaled(jnp.float32(1), loss), data, **options)


def test_a_mean_that_is_zero_keeps_its_gradient() -> None:
    """The weight is 0, and so is the loss, whose slope is the mean of x."""

    def loss(weight: jax.Array, batch: Any, ctx: fg.Context) -> Any:
        return fg.metrics.Mean.from_values(weight * batch)

    result = fit(loss, [X], weight=0.0)
    assert float(result.module.weight) == pytest.approx(-0.1 * X.mean(), rel=1e-6)
    assert result.history["train/loss"] == [0.0]


def test_a_mean_over_nothing_is_zero_and_trains_nothing() -> None:
    def loss(weight: jax.Array, batch: Any, ctx: fg.Context) -> Any:
        return fg.metrics.Mean.from_values(jnp.log(weight * batch), batch > 100)

    result = fit(loss, [X])
    assert float(result.module.weight) == 1.0


def test_a_log_step_whose_batches_weigh_nothing_is_told_once() -> None:
    """Its loss is a mean over nothing; the next one has values again."""

    def loss(weight: jax.Array, batch: Any, ctx: fg.Context) -> Any:
        return fg.metrics.Mean.from_values(weight * batch, batch > 0)

    nothing = np.zeros_like(X)
    result = fit(loss, [nothing, nothing, X], steps=3)
    first, second, third = result.history["train/loss"]
    assert np.isnan([first, second]).all() and third == pytest.approx(X[X > 0].mean())
    (message,) = result.messages
    assert message.startswith("train/loss is NaN at step 1, because it is a mean over nothing")
    assert fit(loss, [nothing, X], steps=2, log_every=2).messages == []


def test_a_term_over_nothing_adds_nothing_to_the_loss() -> None:
    def loss(weight: jax.Array, batch: Any, ctx: fg.Context) -> Any:
        common = fg.metrics.Mean.from_values(weight * batch, batch > 0)
        rare = fg.metrics.Mean.from_values(weight * batch, batch > 100)
        return fg.Output(losses={"rare": rare, "common": common}, preds=batch)

    expected = pytest.approx(X[X > 0].mean())
    result = fit(loss, [X])
    assert result.history["train/loss"][0] == expected == result.history["train/batch_loss"][0]
    assert np.isnan(result.history["train/rare"][0]) and result.messages == []
    values = evaluate(loss, [X[:2], X[2:]])
    assert values["loss"] == expected and np.isnan(values["rare"])

    def common(preds: Any, batch: Any, mask: Any) -> Any:
        return fg.metrics.Mean.from_values(preds, preds > 0)

    def rare(preds: Any, batch: Any, mask: Any) -> Any:
        return fg.metrics.Mean.from_values(preds, preds > 100)

    losses = {"rare": rare, "common": common}
    assert evaluate(loss, [X[:2], X[2:]], losses=losses)["loss"] == expected
    result = fit(loss, [np.zeros_like(X)])
    assert np.isnan(result.history["train/loss"][0])
    assert result.messages[0].startswith("train/loss is NaN at step 1, because it is a mean over")


def test_an_evaluation_whose_batches_weigh_nothing_is_told_once() -> None:
    def loss(weight: jax.Array, batch: Any, ctx: fg.Context) -> Any:
        return fg.Output(fg.metrics.Mean.from_values(weight * batch, batch > 0), preds=batch)

    nothing = np.zeros_like(X)
    engine = fg.Engine(autoload=False)
    module = Scaled(jnp.float32(1), loss)
    with pytest.warns(UserWarning, match="of evaluation 'test' is NaN, because it is a mean over"):
        assert np.isnan(engine.evaluate(module, [nothing, nothing])["loss"])
    # The second time, and where some batch weighs something or NaN has another reason, nothing is.
    assert np.isnan(engine.evaluate(module, [nothing, nothing])["loss"])
    assert evaluate(loss, [nothing, X])["loss"] == pytest.approx(X[X > 0].mean())
    assert np.isnan(
        evaluate(loss, [X], losses={"loss": lambda preds, batch: preds * np.nan})["loss"]
    )
    with pytest.warns(UserWarning, match="of evaluation 'test' is NaN"):

        def empty_term(preds: Any, batch: Any, mask: Any) -> Any:
            return fg.metrics.Mean.from_values(preds, preds > 100)

        evaluate(loss, [X], losses={"none": empty_term})


def test_a_metric_in_the_place_of_the_loss_may_be_nan_for_its_own_reasons() -> None:
    def loss(weight: jax.Array, batch: Any, ctx: fg.Context) -> Any:
        logarithm = fg.metrics.Mean.from_values(jnp.log(-1 - batch))
        return fg.Output(fg.metrics.Mean.from_values(weight * batch), metrics={"loss": logarithm})

    result = fit(loss, [X])
    assert np.isnan(result.history["train/loss"]).all() and result.messages == []


def test_a_loss_of_weight_zero_trains_nothing_even_where_it_is_nan() -> None:
    def loss(weight: jax.Array, batch: Any, ctx: fg.Context) -> Any:
        is_token = batch > 100
        num_tokens = jnp.sum(is_token)
        total = jnp.sum(jnp.where(is_token, weight * batch, 0))
        return fg.Output(total / num_tokens, weight=num_tokens)

    assert float(fit(loss, [X]).module.weight) == 1.0


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda w, batch, ctx: fg.metrics.Std.from_values(w * batch),
            "returned Std: return fg.Output",
        ),
        (
            lambda w, batch, ctx: fg.Output(fg.metrics.Std.from_values(w * batch)),
            "the loss term 'loss' is a Std",
        ),
        (
            lambda w, batch, ctx: fg.Output(w * batch.mean(), weight=jnp.ones(3)),
            "what a loss is a mean over is one real number",
        ),
        (
            lambda w, batch, ctx: fg.Output(w * batch.mean(), weight="tokens"),  # pyright: ignore[reportArgumentType]
            "what a loss is a mean over is one real number",
        ),
    ],
    ids=["bare-metric", "metric", "array", "string"],
)
def test_what_is_no_weighted_loss_is_an_error(loss: Loss, message: str, unchecked: Any) -> None:
    with pytest.raises(ModelError, match=message):
        fit(loss, [X])


@pytest.mark.full
def test_a_term_added_from_inside_a_step_may_be_a_mean() -> None:
    """5 tokens of 1 in the first batch, 1 of 7 in the second, beside a loss over examples."""

    def loss(weight: jax.Array, batch: Any, ctx: fg.Context) -> Any:
        ctx.add_loss("tokens", fg.metrics.Mean.from_values(weight * batch, batch > 0))
        return fg.Output(weight * 0)

    batches = [
        np.array(rows, np.float32) for rows in ([[1, 1, 1], [1, 1, 0]], [[7, 0, 0], [0, 0, 0]])
    ]
    expected = {"tokens": 2.0, "loss": 2.0}
    assert evaluate(loss, batches) == pytest.approx(expected, rel=1e-6)
    result = fit(loss, batches, steps=2, log_every=2, weight=1.0)
    second = 1 - 0.1  # the first gradient is 1
    assert result.history["train/tokens"] == pytest.approx([(5 * 1 + 7 * second) / 6], rel=1e-6)


def test_means_of_one_name_are_not_added_up() -> None:
    def loss(weight: jax.Array, batch: Any, ctx: fg.Context) -> Any:
        ctx.add_loss("aux", fg.metrics.Mean.from_values(weight * batch), accumulate=True)
        return fg.Output(weight * jnp.mean(batch))

    with pytest.raises(ModelError, match=r"add_loss\('aux', accumulate=True\) adds up numbers"):
        fit(loss, [X])


def test_a_source_says_how_many_examples_a_batch_has() -> None:
    """A graph of 3 nodes and 2 edges is one example, one of 5 nodes counts as three."""

    def loss(weight: jax.Array, batch: Any, ctx: fg.Context) -> Any:
        return weight * jnp.mean(batch["nodes"])

    batches = [
        fg.Batch({"nodes": np.full(3, 2.0, np.float32), "edges": np.ones((2, 2))}, num_examples=1),
        fg.Batch({"nodes": np.full(5, 6.0, np.float32), "edges": np.ones((2, 4))}, num_examples=3),
    ]
    assert evaluate(loss, batches) == {"loss": pytest.approx((2 + 3 * 6) / 4)}
    with pytest.raises(DataError, match=r"begin with different lengths \(edges with 2, nodes"):
        evaluate(loss, [batch.value for batch in batches])


def test_a_step_whose_loss_is_a_mean_needs_no_number_of_examples() -> None:
    def loss(weight: jax.Array, batch: Any, ctx: fg.Context) -> Any:
        return fg.metrics.Mean.from_values(weight * batch["nodes"])

    batches = [
        {"nodes": np.full(3, 2.0, np.float32), "edges": np.ones((2, 2), np.float32)},
        {"nodes": np.full(1, 6.0, np.float32), "edges": np.ones((2, 4), np.float32)},
    ]
    assert evaluate(loss, batches) == {"loss": pytest.approx((3 * 2 + 6) / 4)}


# --- what is tried


def mean_of_tokens(weight: jax.Array, batch: Any, ctx: fg.Context) -> Any:
    return weight * jnp.sum(batch) / jnp.sum(batch > 0)


def root_of_mean(weight: jax.Array, batch: Any, ctx: fg.Context) -> Any:
    return fg.Output(weight * jnp.mean(batch), metrics={"rmse": jnp.sqrt(jnp.mean(batch**2))})


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (mean_of_tokens, "the loss of 4 examples is "),
        (lambda w, batch, ctx: w * jnp.sum(batch), "the loss of 4 examples is "),
        (root_of_mean, "the metric 'rmse' of 4 examples is "),
        (
            lambda w, batch, ctx: w * jnp.mean(batch.reshape(6, 3)),
            "could not be tried on a few of them: TypeError: cannot reshape",
        ),
    ],
    ids=["tokens", "sum", "rmse", "fixed-size"],
)
def test_an_evaluation_of_several_batches_says_what_is_no_mean_over_examples(
    loss: Loss, message: str
) -> None:
    with pytest.warns(UserWarning, match=message):
        evaluate(loss, [X, X])
    evaluate(loss, [X])  # one batch is not divided


def test_both_numbers_of_a_trial_are_those_by_hand() -> None:
    """Of the rows with the fewest and the most numbers: two of each."""
    rows = X[[1, 4, 2, 5]]
    halves = [rows[:2], rows[2:]]
    whole = rows.sum() / (rows > 0).sum()
    mean = np.mean([half.sum() / (half > 0).sum() for half in halves])
    with pytest.warns(UserWarning, match=rf"is {whole:.6g}, and the mean .* is {mean:.6g}\."):
        evaluate(mean_of_tokens, [X, X])


@pytest.mark.variants("full")
@pytest.mark.parametrize(
    "loss",
    [
        lambda w, batch, ctx: w * jnp.mean(batch),
        lambda w, batch, ctx: fg.Output(w * jnp.mean(batch), metrics={"rate": jnp.float32(0.1)}),
        lambda w, batch, ctx: w * jnp.mean(batch * jax.random.normal(ctx.key(), batch.shape)),
        lambda w, batch, ctx: fg.metrics.Mean.from_values(w * batch, batch > 0).compute(),
        lambda w, batch, ctx: fg.Output(
            w * jnp.sum(batch) / jnp.sum(batch > 0), weight=jnp.sum(batch > 0)
        ),
        lambda w, batch, ctx: w * jnp.mean((batch + 0.37).astype(jnp.bfloat16)),
        lambda w, batch, ctx: (
            w * jnp.mean((1.7 * batch).astype(jnp.bfloat16)).astype(jnp.float32) + 0.1 * w**2
        ),
    ],
    ids=["mean", "constant-metric", "random", "computed", "weight", "bfloat16", "rounded-term"],
)
def test_what_is_a_mean_or_cannot_be_told_needs_no_words(loss: Loss) -> None:
    """Warnings are errors here."""
    evaluate(loss, [X, X])
    assert fit(loss, fg.ArrayData(X, 4), steps=2).messages == []


def test_padding_is_no_part_of_a_trial() -> None:
    def loss(weight: jax.Array, batch: Any, ctx: fg.Context) -> Any:
        mask: Any = ctx.mask
        return weight * jnp.mean(batch, where=mask[:, None])

    data = fg.ArrayData(X[:5], 3, remainder="pad")
    assert evaluate(loss, data) == {"loss": pytest.approx(X[:5].mean())}


@pytest.mark.full
@pytest.mark.parametrize("remainder", ["keep", "pad"])
def test_a_fit_whose_last_batch_has_fewer_examples_says_it_once(remainder: Any) -> None:
    """Padded to the length of the others, it weighs as little."""
    engine = fg.Engine(epochs=2, autoload=False)
    module = Scaled(jnp.float32(1), mean_of_tokens)
    data = fg.ArrayData(X, 4, remainder=remainder)
    (message,) = engine.fit(module, data).messages
    assert "batches differ in how many they have, but the loss of 4 examples is" in message
    assert engine.fit(module, data).messages == []
    for even in (fg.ArrayData(X, 3), fg.ArrayData(X, 4, remainder="drop")):
        assert fit(mean_of_tokens, even, steps=2).messages == []


def test_a_loss_that_is_no_mean_is_refused_by_accumulation_in_each_fit_of_an_engine() -> None:
    engine = fg.Engine(steps=2, autoload=False, plugins=[GradientAccumulation(2)])
    for _ in range(2):
        with pytest.raises(ModelError, match="gradients are averaged over examples, but the loss"):
            engine.fit(Scaled(jnp.float32(1), mean_of_tokens), fg.ArrayData(X, 4))


@pytest.mark.full
def test_a_message_of_an_evaluation_in_a_fit_is_one_of_the_fit() -> None:
    class Evaluation:
        @fg.hookimpl
        def register_evaluations(self) -> list[fg.Evaluation]:
            return [fg.Evaluation("test", [X, X])]

        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [fg.ScheduledAction("look", fg.Every(1), self.evaluate, "evaluate")]

        def evaluate(self, run: fg.Run) -> None:
            run.engine.run_evaluation("test", run.state)

    result = fit(mean_of_tokens, [X], steps=3, plugins=[Evaluation()])
    (message,) = result.messages
    assert message.startswith("the results of evaluation 'test' depend on how its data is divided")
