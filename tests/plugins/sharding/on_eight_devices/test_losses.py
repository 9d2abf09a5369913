"""Losses and metrics over eight devices are those of one."""

import warnings
from functools import partial
from typing import Any

import equinox as eqx
import fulgurite as fg
import fulgurite_losses as fl
import fulgurite_metrics as fm
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from eight_devices import engine, some
from fulgurite.errors import ConfigurationError
from fulgurite_keys import L1, L2, KeyedTask, Losses, Metrics, keyed
from fulgurite_metrics import Norm
from fulgurite_sharding import (
    FSDP,
    DataParallel,
    average_by_device,
    gather,
)
from jax.sharding import NamedSharding, PartitionSpec as P


class LossesByDevice(fg.Module):
    """Notes the mean loss of each device's examples, in a metric of its own."""

    weight: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.weight = jnp.zeros(())

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        losses = (self.weight - batch["x"]) ** 2
        metrics = {
            "devices": average_by_device(losses, ctx.mask),
            "weighted": average_by_device(losses, ctx.mask, batch["x"]),
        }
        return fg.Output(fg.metrics.Mean.from_values(losses, ctx.mask), metrics=metrics)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def test_losses_by_device_are_those_of_its_examples() -> None:
    x = np.random.default_rng(0).uniform(1, 2, size=(3, 16)).astype(np.float32)
    batches = [{"x": row} for row in x]
    for preset in (DataParallel(), FSDP()):
        result = engine(preset, steps=3, log_every=3).fit(LossesByDevice, batches)
        # Two steps of gradient descent by NumPy, over what each device had in the window.
        weight, losses = 0.0, []
        for row in x:
            losses.append((weight - row.astype(np.float64)) ** 2)
            weight -= 0.1 * 2 * np.mean(weight - row.astype(np.float64))
        by_device = np.concatenate([loss.reshape(8, 2) for loss in losses], axis=1)
        weights = np.concatenate([row.reshape(8, 2) for row in x], axis=1)
        logged = result.metrics["train"]
        np.testing.assert_allclose(logged["devices"], by_device.mean(1), rtol=1e-5)
        expected = (by_device * weights).sum(1) / weights.sum(1)
        np.testing.assert_allclose(logged["weighted"], expected, rtol=1e-5)
    # The last two devices have padding alone.
    padded = fg.ArrayData({"x": x[0, :12]}, 16, remainder="pad")
    expected = np.append((x[0, :12] ** 2).reshape(6, 2).mean(1), [np.nan, np.nan])
    for data in (padded, [{"x": x[0, :12]}]):
        with warnings.catch_warnings(action="error"):
            evaluated = engine(DataParallel()).evaluate(LossesByDevice(), data)
        np.testing.assert_allclose(evaluated["devices"], expected, rtol=1e-5)
    alone = engine().evaluate(LossesByDevice(), [{"x": x[0]}])
    np.testing.assert_allclose(alone["devices"], [(x[0] ** 2).mean()], rtol=1e-5)
    with jax.set_mesh(some(8)):
        with pytest.raises(ConfigurationError) as caught:
            jax.eval_shape(partial(average_by_device, axes=("model",)), np.zeros(16, np.float32))
        assert "no axis 'model'; it has data" in str(caught.value)


def test_losses_and_metrics_are_those_of_one_device() -> None:
    """Over a batch with padding of NaN, also where examples are compared with each other."""
    random = np.random.default_rng(0)
    mask = np.arange(16) % 5 != 3
    logits = np.where(mask[:, None], random.normal(size=(16, 4)), np.nan).astype(np.float32)
    labels = np.where(mask, random.integers(0, 4, 16), -1)
    batch = (logits, labels, mask)

    def compute_loss(logits: Any, labels: Any, mask: Any) -> Any:
        return (
            fl.softmax_cross_entropy(logits, labels, mask=mask)
            + fl.triplet_loss(logits, labels, mask=mask)
            + fl.info_nce(logits, logits[:, ::-1], mask=mask)
        )

    @jax.jit
    def compute(logits: Any, labels: Any, mask: Any) -> Any:
        first, second = logits[:, 0], logits[:, 1]
        return {
            "loss": jax.value_and_grad(compute_loss)(logits, labels, mask),
            "fbeta": fm.FBeta.from_predictions(logits, labels, mask, beta=2.0),
            "brier": fm.BrierScore.from_logits(logits, labels, mask),
            "pearson": fm.Pearson.from_predictions(first, second, mask),
            "ndcg": fm.NDCG.from_scores(logits, abs(logits), mask),
            "area": fm.RocAucOneVsRest.from_logits(logits, labels, mask),
            "spearman": fm.Spearman.from_predictions(first, second, mask),
        }

    def finish(results: dict[str, Any]) -> Any:
        host = jax.device_get(results)
        return {
            name: value.compute() if hasattr(value, "compute") else value
            for name, value in host.items()
        }

    single = finish(compute(*batch))
    divided = finish(compute(*jax.device_put(batch, NamedSharding(some(8), P("data")))))
    assert not divided["loss"][1][~mask].any()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), divided, single
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(divided))


class Stack(eqx.Module):
    """Blocks under scan and remat, which know nothing of keys."""

    blocks: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        make = partial(eqx.nn.Linear, 32, 32)
        self.blocks = eqx.filter_vmap(lambda key: make(key=key))(jax.random.split(key, 4))

    def __call__(self, x: jax.Array) -> jax.Array:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @jax.checkpoint
        def apply_block(carry: jax.Array, arrays: Any) -> Any:
            return jnp.tanh(eqx.combine(arrays, static)(carry)), None

        return jax.lax.scan(apply_block, x, arrays)[0]


@pytest.mark.slow
def test_a_loss_and_a_metric_on_a_layer_under_fsdp() -> None:
    inputs = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    task = KeyedTask(Stack(key=jax.random.key(0)), {"x": "batch"}, optimizer=optax.sgd(0.1))
    plugins = [
        Losses(fit=L2("preds", "batch"), sparse=L1("interms.model.blocks[2]", weight=0.1)),
        Metrics(hidden=keyed(Norm.from_vectors, "interms.model.blocks[2]")),
    ]
    results = [
        fg.Engine(steps=6, plugins=[*plugins, *layout]).fit(task, fg.ArrayData(inputs, 16))
        for layout in ([], [FSDP(min_size=0)])
    ]
    single, divided = (result.module.model.blocks.weight for result in results)
    assert divided.sharding.shard_shape(divided.shape) != divided.shape
    np.testing.assert_allclose(gather(divided), single, rtol=1e-5, atol=1e-6)
    values = [result.metrics["train"]["metrics/hidden"] for result in results]
    np.testing.assert_allclose(*values, rtol=1e-5)
