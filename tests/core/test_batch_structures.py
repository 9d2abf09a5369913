"""Batches of several structures, or with something static in them, in one fit."""

import random
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import CompilationError, DataError, ModelError
from fulgurite_testing import InMemoryCheckpointer
from models import assert_same_bits


class TwoTasks(fg.Module):
    """One weight for two tasks: a regression with targets, and a penalty on inputs alone."""

    weight: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.weight = jax.random.normal(key, (3,))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        noise = jax.random.normal(ctx.key(), (3,))
        preds = batch["x"] @ (self.weight + 0.01 * noise)
        if "y" in batch:
            error = (preds - batch["y"]) ** 2
            mean = fg.metrics.Mean.from_values(error)
            return fg.Output(error.mean(), metrics={"error": mean, "size": jnp.float32(1)})
        return fg.Output(1e-2 * jnp.abs(preds).mean(), metrics={"size": jnp.float32(2)})

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


def make_batches(count: int = 24, seed: int = 0) -> list[Any]:
    """Batches of two structures, alternating at random."""
    generator = np.random.default_rng(seed)
    choose = random.Random(seed)
    batches = []
    for _ in range(count):
        batch = {"x": generator.normal(size=(4, 3)).astype(np.float32)}
        if choose.random() < 0.5:
            batch["y"] = generator.normal(size=4).astype(np.float32)
        batches.append(batch)
    return batches


BATCHES = make_batches()
EXAMPLES = (
    {"x": np.zeros((4, 3), np.float32), "y": np.zeros(4, np.float32)},
    {"x": BATCHES[0]["x"]},
)
DATA = fg.DataSource(BATCHES, prefetch=0, batch_examples=EXAMPLES)


def train_by_hand(batches: list[Any]) -> Any:
    """A loop over two jitted steps."""
    engine = fg.Engine(autoload=False)
    streams = engine.make_rng_streams(jax.random.key(0))
    model = TwoTasks(key=streams.key("params", "init"))
    optimizer = optax.adam(1e-2)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))

    def compute_loss(model: Any, batch: Any, step: Any) -> Any:
        ctx = fg.Context(streams, step, training=True, rng_step=step)
        return model.training_step(batch, ctx).loss

    def update(model: Any, opt_state: Any, batch: Any, step: Any) -> Any:
        grads = jax.grad(compute_loss)(model, batch, step)
        updates, opt_state = optimizer.update(grads, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state

    update_with_targets = jax.jit(update)
    update_without = jax.jit(update)
    for step, batch in enumerate(batches):
        run = update_with_targets if "y" in batch else update_without
        model, opt_state = run(model, opt_state, batch, jnp.int32(step))
    return model


@pytest.mark.full
@pytest.mark.parametrize("steps_per_execution", [pytest.param(1, marks=pytest.mark.full), 4])
def test_two_structures_equal_a_loop_over_two_jitted_steps(steps_per_execution: int) -> None:
    engine = fg.Engine(
        steps=24, steps_per_execution=steps_per_execution, log_every=5, autoload=False
    )
    result = engine.fit(TwoTasks, DATA)
    assert_same_bits(result.module, train_by_hand(BATCHES))


@pytest.mark.full
def test_metrics_of_one_structure_are_of_its_steps_alone() -> None:
    with_targets = next(batch for batch in BATCHES if "y" in batch)
    without = {"x": with_targets["x"]}
    order = [with_targets, without, without, without, with_targets, with_targets]
    data = fg.DataSource(order, prefetch=0, batch_examples=EXAMPLES)
    history = fg.Engine(steps=6, log_every=2, autoload=False).fit(TwoTasks, data).history
    # Windows of steps 1-2, 3-4 and 5-6: the second has no batch with targets.
    assert history.steps("train/error").tolist() == [2, 6]
    assert history["train/size"].tolist() == [1.5, 2.0, 1.0]
    assert history.steps("train/loss").tolist() == [2, 4, 6]
    alone = fg.Engine(steps=1, log_every=1, autoload=False).fit(TwoTasks, [with_targets]).history
    assert history["train/error"][0] == alone["train/error"][0]


@pytest.mark.full
@pytest.mark.parametrize("stop", [11, pytest.param(5, marks=pytest.mark.slow)])
def test_a_run_over_two_structures_resumes_exactly(stop: int) -> None:
    whole = fg.Engine(steps=24, log_every=4, autoload=False).fit(TwoTasks, DATA)
    memory = InMemoryCheckpointer()
    stopping = fg.Engine(
        steps=24,
        log_every=4,
        autoload=False,
        plugins=[
            memory,
            fg.LambdaPlugin(every={stop: lambda run: run.request_stop("a test")}),
        ],
    )
    interrupted = stopping.fit(TwoTasks, DATA).state
    assert int(interrupted.step) < 24
    resuming = fg.Engine(
        steps=24, log_every=4, autoload=False, plugins=[InMemoryCheckpointer(memory.checkpoints)]
    )
    resumed = resuming.fit(TwoTasks, DATA, resume="latest")
    assert_same_bits(resumed.state, whole.state)
    for name in whole.history:
        later = whole.history.steps(name) > int(interrupted.step)
        assert resumed.history[name].tolist() == whole.history[name][later].tolist()


@pytest.mark.full
def test_the_static_part_of_a_batch_reaches_the_step() -> None:
    specs: list[Any] = []

    class Scaled(TwoTasks):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            specs.append(ctx.spec)
            scale = {"small": 1.0, "large": 10.0}[str(ctx.spec)]
            return fg.Output(scale * jnp.mean(batch["x"] @ self.weight))

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(1.0)

    x = np.ones((4, 3), np.float32)
    batches = [fg.Batch({"x": x}, spec="small"), fg.Batch({"x": x}, spec="large")]
    data = fg.DataSource(batches, prefetch=0, batch_examples=tuple(batches))
    engine = fg.Engine(steps=2, autoload=False)
    make: Any = Scaled
    start = make(key=jax.random.key(1))
    result = engine.fit(start, data)
    np.testing.assert_allclose(result.module.weight, start.weight - 11, rtol=1e-6)
    assert {*specs} == {"small", "large"}
    assert engine.evaluate(result, data)["loss"] == pytest.approx(
        5.5 * float(jnp.sum(result.module.weight)), rel=1e-5
    )


@pytest.mark.full
def test_a_loop_of_one_s_own_takes_batches_of_both_structures() -> None:
    engine = fg.Engine(seed=0, autoload=False)
    state = engine.init_state(TwoTasks, DATA)
    agreements = []
    for batch in BATCHES[:6]:
        state, output = engine.step(state, batch)
        agreements.append(("error" in output.metrics) == ("y" in batch))
    assert all(agreements)
    fitted = fg.Engine(seed=0, steps=6, autoload=False).fit(TwoTasks, DATA)
    assert_same_bits(state.module, fitted.module)


@pytest.mark.full
def test_an_accident_is_an_error_that_names_both_structures() -> None:
    with_targets = next(batch for batch in BATCHES if "y" in batch)
    with pytest.raises(DataError, match=r"step 2 has another structure.*batch_examples") as caught:
        fg.Engine(steps=2, autoload=False).fit(TwoTasks, [with_targets, {"x": with_targets["x"]}])
    assert "y float32[4]" in str(caught.value)
    other = fg.DataSource([{"z": with_targets["x"]}], prefetch=0, batch_examples=EXAMPLES)
    with pytest.raises(DataError, match=r"step 1 has another structure"):
        fg.Engine(steps=1, autoload=False).fit(TwoTasks, other)


def test_the_cap_on_compilations_counts_all_structures() -> None:
    engine = fg.Engine(steps=24, max_compilations=1, autoload=False)
    with pytest.raises(CompilationError, match="shape number 2"):
        engine.fit(TwoTasks, DATA)


def test_a_metric_of_two_kinds_is_an_error_before_the_first_step() -> None:
    class Torn(TwoTasks):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            output = super().training_step(batch, ctx)
            kind = fg.metrics.Mean if "y" in batch else fg.metrics.Max
            return output.replace(metrics={"odd": kind.from_values(batch["x"])})

    with pytest.raises(ModelError, match="the metric 'odd' on batches of another structure"):
        fg.Engine(steps=2, autoload=False).fit(Torn, DATA)


@pytest.mark.full
def test_evaluations_merge_the_metrics_of_both_structures() -> None:
    engine = fg.Engine(autoload=False)
    model = TwoTasks(key=jax.random.key(2))
    values = engine.evaluate(model, DATA)
    assert values["size"] == pytest.approx(np.mean([1 if "y" in b else 2 for b in BATCHES]))
    with_targets = [batch for batch in BATCHES if "y" in batch]
    noiseless = engine.evaluate(model, with_targets)
    assert values["error"] == pytest.approx(noiseless["error"], rel=0.05)
