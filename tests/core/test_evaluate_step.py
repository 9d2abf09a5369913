"""An evaluation in a loop of one's own: totals that batches are added to, one at a time."""

from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite.errors import ConfigurationError, DataError, ModelError
from models import Kept, Linear, regression


class Weighted(Linear):
    """A loss over tokens, of which an example has up to four, and metrics of each kind."""

    def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        errors = jnp.abs(batch["x"] @ self.weight - batch["y"])
        mask = jnp.ones(errors.shape, bool) if ctx.mask is None else ctx.mask
        tokens = jnp.where(mask, batch["tokens"], 0)
        noise = jax.random.uniform(ctx.key())
        return fg.Output(
            jnp.sum(errors * tokens) / jnp.sum(tokens),
            weight=jnp.sum(tokens),
            metrics={
                "error": fg.metrics.Mean.from_values(errors, mask),
                "noise": fg.metrics.LastValue.from_values(noise),
                "values": Kept(mask=mask, values=errors),
            },
        )


@pytest.mark.full
def test_totals_over_many_steps_are_those_of_one_evaluation_and_of_numpy() -> None:
    # 9 batches: the last has five examples, and three of these are padding.
    arrays = dict(regression(69).arrays)
    arrays["tokens"] = np.random.default_rng(0).integers(1, 5, 69)
    batches: list[Any] = list(fg.ArrayData(arrays, 8))
    batches[-1]["y"] = np.where(np.arange(5) < 2, batches[-1]["y"], 1e9).astype(np.float32)
    batches[-1] = fg.Batch(batches[-1], np.arange(5) < 2)
    engine = fg.Engine(steps=1, autoload=False)
    state, _ = engine.step(engine.init_state(Weighted, batches[:1]), batches[0])
    weight = np.asarray(state.module.weight, np.float64)
    errors = np.abs(arrays["x"] @ weight - arrays["y"])
    after_three = totals = None
    for index, batch in enumerate(batches, 1):
        totals = engine.evaluate_step(state, batch, totals)
        after_three = totals if index == 3 else after_three
    # Totals are values: the earlier ones are as they were.
    for part, num_batches, num_examples in ((totals, 9, 66), (after_three, 3, 24)):
        assert part is not None and part.num_batches == num_batches
        values = part.compute()
        counted = slice(num_examples)
        tokens = arrays["tokens"][counted]
        loss = errors[counted] @ tokens / tokens.sum()
        assert values["loss"] == pytest.approx(loss, rel=1e-5)
        assert values["error"] == pytest.approx(errors[counted].mean(), rel=1e-5)
        np.testing.assert_allclose(values["values"], errors[counted], rtol=1e-4)
        metrics = part.read_metrics()
        assert metrics["error"].compute() == pytest.approx(values["error"])
        assert isinstance(metrics["values"], Kept) and metrics["values"].mask.sum() == num_examples
        # Random numbers too.
        at_once = engine.evaluate(state, batches[:num_batches])
        assert values.keys() == at_once.keys()
        for name, value in values.items():
            np.testing.assert_array_equal(value, at_once[name])


@pytest.mark.full
def test_a_model_may_change_between_the_steps_of_an_evaluation() -> None:
    batches = list(regression(16))[:2]
    engine = fg.Engine(steps=2, autoload=False)
    state = engine.init_state(Linear, batches)
    totals, losses = None, []
    for batch in batches:
        weight = np.asarray(state.module.weight)
        losses.append(np.mean((batch["x"] @ weight - batch["y"]) ** 2))
        totals = engine.evaluate_step(state, batch, totals, name="progressive")
        state, _ = engine.step(state, batch)
    assert totals is not None
    assert totals.compute()["loss"] == pytest.approx(np.mean(losses), rel=1e-6)


def test_metrics_of_one_s_own_and_totals_of_another_evaluation() -> None:
    batches = list(regression(16))[:2]
    engine = fg.Engine(steps=1, autoload=False)
    state = engine.init_state(Linear, batches)

    def measure(preds: Any, batch: Any) -> Any:
        return jnp.abs(preds - batch["y"])

    totals = None
    for batch in batches:
        totals = engine.evaluate_step(state, batch, totals, metrics={"absolute": measure})
    assert totals is not None
    targets = np.concatenate([batch["y"] for batch in batches])
    assert totals.compute()["absolute"] == pytest.approx(np.abs(targets).mean(), rel=1e-6)
    for arguments in ({"name": "other", "metrics": {"absolute": measure}}, {}):
        with pytest.raises(ConfigurationError, match="give each evaluation totals of its own"):
            engine.evaluate_step(state, batches[0], totals, **arguments)


def test_totals_of_other_metrics_and_batches_that_are_no_tree_of_arrays_are_refused() -> None:
    class Renamed(Linear):
        def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(metrics={"renamed": fg.metrics.Mean.from_values(batch["y"])})

    class Named(Linear):
        def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(metrics={"named": fg.metrics.Mean.from_values(batch["y"])})

    batch = next(iter(regression(8)))
    engine = fg.Engine(steps=1, autoload=False)
    # Both are compiled, for numbers of the same shapes.
    models: list[Any] = [make() for make in (Named, Renamed)]  # pyright: ignore[reportCallIssue]
    totals_of_others = [engine.evaluate_step(model, batch) for model in reversed(models)]
    for model, totals in zip(models, totals_of_others, strict=True):
        with pytest.raises(ModelError, match="the metrics of batch 1 of 'test'"):
            engine.evaluate_step(model, batch, totals)
    with pytest.raises(DataError, match="arrays of numbers"):
        engine.evaluate_step(models[0], {"x": "string"})
