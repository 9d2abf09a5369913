"""`jax_numpy_dtype_promotion="strict"`, under which sums of numbers of different dtypes are
errors."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import fulgurite as fg
import fulgurite_losses
import fulgurite_metrics
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite_averaging import EMA, Average, Lookahead, Mean, recompute_statistics
from fulgurite_evaluators import Evaluator
from fulgurite_logging import LearningRateMonitor, NormMonitor
from fulgurite_logging.media import Histogram
from fulgurite_lora import Lora
from fulgurite_optimizers import (
    Freeze,
    GradientAccumulation,
    GradientClip,
    MultiOptimizer,
    Phase,
    ReduceOnPlateau,
    UnitNorm,
    WeightClip,
)
from fulgurite_population import Evolution, Population
from fulgurite_precision import Dynamic, Precision
from fulgurite_sam import Sam
from fulgurite_stopping import EarlyStopping, SpikeDetection

pytestmark = pytest.mark.full

X = np.random.default_rng(0).normal(size=(22, 3)).astype(np.float32)
Y = X.sum(1)


class Net(fg.Module):
    body: eqx.nn.Linear
    head: eqx.nn.Linear
    has_games: bool = eqx.field(static=True, default=False)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        x, y = batch
        preds = jax.vmap(lambda x: self.head(jnp.tanh(self.body(x))))(x)[:, 0]
        loss = fg.metrics.Mean.from_values((preds - y) ** 2, ctx.mask).compute()
        metrics = {
            "std": fg.metrics.Std.from_values(preds, ctx.mask),
            "average": fg.metrics.ExponentialMovingAverage.from_values(loss),
            "accuracy": fg.metrics.Accuracy.from_binary_logits(preds, y > 0, ctx.mask),
        }
        if not self.has_games:
            return fg.Output(loss, metrics)
        return fg.Output(losses={"body": loss, "head": 2 * loss}, metrics=metrics)

    def configure_optimizers(self) -> optax.GradientTransformation:
        # Not Adam: that of optax 0.2.8 itself is an error under strict promotion.
        return optax.inject_hyperparams(optax.sgd)(learning_rate=0.02, momentum=0.9)


class Half(Net):
    """A network of bfloat16, with a further loss in float32."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        ctx.add_loss("l2", 1e-3 * jnp.sum(self.head.weight.astype(jnp.float32) ** 2))
        batch = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), batch)
        preds = jax.vmap(lambda x: self.head(jnp.tanh(self.body(x))))(batch[0])[:, 0]
        return fg.Output(jnp.mean((preds - batch[1]) ** 2, where=ctx.mask))


def make_net(net_class: type[Net] = Net, has_games: bool = False, dtype: Any = None) -> Net:
    body, head = jax.random.split(jax.random.key(0))
    return net_class(
        eqx.nn.Linear(3, 4, key=body, dtype=dtype),
        eqx.nn.Linear(4, 1, key=head, dtype=dtype),
        has_games,
    )


def make_data() -> fg.ArrayData:
    return fg.ArrayData((X, Y), 8, remainder="pad", shuffle=True)


def train_with_conditions() -> Any:
    plugins = [
        Average(EMA(0.9, warmup=True, every=2)),
        Average(EMA(0.9, debiased=True), name="debiased"),
        Average(Mean(after=0.5, every=2), name="mean"),
        Lookahead(2),
        SpikeDetection(factor=1.1, window=2, action="skip"),
        NormMonitor(groups={"head": "head"}),
        LearningRateMonitor(),
        GradientClip(max_norm=0.5, max_value=1.0),
        UnitNorm("body.weight"),
        WeightClip("head", 0.5),
        Freeze("body.bias", until=3),
        Evaluator("val", make_data(), every=2),
        ReduceOnPlateau("val/loss", every=2, patience=1),
        EarlyStopping("val/loss", patience=3),
    ]
    return train(make_net(), *plugins, on_nonfinite="skip")


def train_with_microbatches() -> Any:
    plugins = [Precision("fp16", scale=Dynamic(period=2)), GradientAccumulation({0: 1, 2: 2})]
    return train(make_net(), *plugins, on_nonfinite="skip")


def train_with_accumulation_over_steps() -> Any:
    return train(make_net(), GradientAccumulation(4, "steps"))


def train_with_phases() -> Any:
    phases: Any = {
        "body": Phase(optax.sgd(0.1), "body", accumulate=GradientAccumulation(4, "steps")),
        "head": Phase(optax.sgd(0.1), "head", repeat=2, split=True),
    }
    return train(make_net(has_games=True), MultiOptimizer(**phases))


def train_in_bfloat16() -> Any:
    return train(make_net(Half, dtype=jnp.bfloat16), Average(EMA(0.9)), Sam(adaptive=True))


def train_adapters() -> Any:
    return train(make_net(), Sam(), Lora("body", rank=2, dropout=0.1))


def train_a_population() -> Any:
    evolution = Evolution(every=2, monitor="val/loss", share=0.4)
    population = Population((0, 1, 2), {"learning_rate": [0.01, 0.02, 0.03]}, evolution=evolution)
    evaluator = Evaluator("val", make_data(), every=2)
    module = population.stack(lambda key: make_net())
    return train(module, population, evaluator, on_nonfinite="skip")


def train(module: Any, *plugins: Any, **settings: Any) -> Any:
    engine = fg.Engine(steps=6, log_every=2, plugins=plugins, **settings)
    result = engine.fit(module, make_data())
    return result.state, engine.evaluate(result, make_data())


def recompute() -> Any:
    class Normalized(fg.Module):
        norm: eqx.nn.BatchNorm

        def __init__(self, *, key: Any) -> None:
            self.norm = eqx.nn.BatchNorm(3, "batch", mode="batch")

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            assert ctx.model_state is not None
            apply = jax.vmap(self.norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            preds, state = apply(batch, ctx.model_state)
            return fg.Output(jnp.mean(preds**2), model_state=state)

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(0.1)

    engine = fg.Engine(steps=2)
    data = fg.ArrayData(X, 11)
    return recompute_statistics(engine, engine.fit(eqx.nn.make_with_state(Normalized), data), data)


def measure() -> Any:
    preds, labels = jnp.asarray(X), jnp.asarray(X.argmax(1))
    metrics = [
        fulgurite_metrics.F1.from_multilabel(preds > 0, preds > 1),
        fulgurite_metrics.NDCG.from_scores(preds, preds > 0),
        fulgurite_metrics.MeanReciprocalRank.from_scores(preds, preds > 0),
        fulgurite_metrics.ExpectedCalibrationError.from_logits(preds, labels),
        fg.metrics.Accuracy.from_binary_logits(preds, preds > 1),
    ]
    losses = fulgurite_losses.triplet_loss(preds, labels)
    return [metric.compute() for metric in metrics], losses, Histogram.from_values(preds, 4)


@pytest.mark.parametrize(
    "compute",
    [
        pytest.param(train_with_conditions, marks=pytest.mark.slow),
        pytest.param(train_with_microbatches, marks=pytest.mark.slow),
        pytest.param(train_with_accumulation_over_steps, marks=pytest.mark.slow),
        pytest.param(train_with_phases, marks=pytest.mark.slow),
        pytest.param(train_in_bfloat16, marks=pytest.mark.slow),
        pytest.param(train_adapters, marks=pytest.mark.slow),
        pytest.param(train_a_population, marks=pytest.mark.slow),
        pytest.param(recompute, marks=pytest.mark.full),
        pytest.param(measure, marks=pytest.mark.full),
    ],
    ids=lambda compute: compute.__name__,
)
def test_strict_promotion_changes_no_bit(compute: Callable[[], Any]) -> None:
    with jax.numpy_dtype_promotion("strict"):
        strict = compute()
    arrays, expected = (eqx.filter(tree, eqx.is_array) for tree in (strict, compute()))
    for array, other in zip(jax.tree.leaves(arrays), jax.tree.leaves(expected), strict=True):
        if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(array, other)
