"""Members of a population: each is what a run of its own would be."""

# pyright: reportArgumentType=false

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ModelError
from fulgurite_evaluators import Evaluator
from fulgurite_lora import Lora
from fulgurite_optimizers import GradientClip, MultiOptimizer, Phase
from fulgurite_population import Population
from fulgurite_precision import Dynamic, Precision
from fulgurite_stopping import SpikeDetection
from populations import (
    NUMBERS,
    Net,
    Point,
    assert_same_bits,
    fit,
    make_batches,
    sgd,
)


class Clipped(Net):
    """A network whose optimizer clips by the global norm, Adam after that."""

    def configure_optimizers(self):
        return optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("model", "plugins"),
    [
        pytest.param(Net, (GradientClip(0.1),), marks=pytest.mark.slow),
        pytest.param(Net, (), marks=pytest.mark.full),
        pytest.param(Clipped, (), marks=pytest.mark.slow),
    ],
)
def test_exact_members_have_the_bits_of_runs_of_their_own(model, plugins):
    seeds = (3, 1, 0, 7)
    batches = make_batches(50)
    result = fit(model, batches, 50, Population(seeds=seeds, exact=True), *plugins)
    for index, seed in enumerate(seeds):
        engine = fg.Engine(steps=50, seed=seed, autoload=False, plugins=[*plugins])
        assert_same_bits(result.module.take(index), engine.fit(model, batches).module)


@pytest.mark.full
def test_members_predict_with_forward_as_each_does_without_labels():
    class Shared(Net):
        def forward(self, batch, ctx):
            return jax.vmap(self.net)(batch["x"])

    result = fit(Shared, make_batches(2), 2, Population(seeds=(3, 5)))
    inputs = np.random.default_rng(1).normal(size=(7, 4)).astype(np.float32)
    preds = fg.Engine(autoload=False).predict(result, fg.ArrayData({"x": inputs}, 3))
    assert preds.shape == (7, 2, 2)
    for index in range(2):
        expected = jax.vmap(result.module.take(index).net)(inputs)
        np.testing.assert_allclose(preds[:, index], expected, rtol=1e-5, atol=1e-6)


class Two(fg.Module):
    """Two numbers with a loss each."""

    x: jax.Array
    y: jax.Array

    def __init__(self, *, key):
        self.x, self.y = jax.random.normal(key, (2,))

    def training_step(self, batch, ctx):
        return fg.Output(losses={"g": self.x**2 / 2 * batch["x"].mean(), "d": self.y**2 / 2})


class TwoFunctions(Two):
    """The same, by functions."""

    def losses(self, batch, ctx):
        return {"g": lambda: self.x**2 / 2 * batch["x"].mean(), "d": lambda: self.y**2 / 2}


def make_phases(order, rates=(0.1, 0.1)):
    return MultiOptimizer(order=order, g=Phase(sgd(rates[0]), "x"), d=Phase(sgd(rates[1]), "y"))


@pytest.mark.full
@pytest.mark.parametrize("order", ["alternating", "simultaneous"])
@pytest.mark.parametrize("model", [Two, pytest.param(TwoFunctions, marks=pytest.mark.full)])
def test_several_optimizers_train_each_member_as_a_run_of_its_own(model, order):
    population = Population(seeds=(3, 5), vary={"learning_rate": [0.1, 0.2]})
    result = fit(model, NUMBERS, 2, population, make_phases(order), log_every=1)
    for index, (seed, rate) in enumerate([(3, 0.1), (5, 0.2)]):
        phases = make_phases(order, (rate, rate))
        alone = fg.Engine(steps=2, seed=seed, autoload=False, plugins=[phases], log_every=1).fit(
            model, NUMBERS
        )
        member = result.module.take(index)
        np.testing.assert_allclose((member.x, member.y), (alone.module.x, alone.module.y))
        for name, value in alone.metrics["train"].items():
            np.testing.assert_allclose(result.metrics["train"][f"{name}[{index}]"], value)


@pytest.mark.full
def test_a_rate_of_one_optimizer_varies():
    population = Population(seeds=(3, 5), vary={"g/learning_rate": [0.5, 1.0]})
    result = fit(Two, NUMBERS, 1, population, make_phases("simultaneous"))
    start = population.stack(Two)(key=jax.random.key(0)).members
    np.testing.assert_allclose(result.module.members.x, start.x * np.array([0.5, 0]), rtol=1e-6)
    np.testing.assert_allclose(result.module.members.y, start.y * 0.9, rtol=1e-6)


class Terms(Point):
    """A number with a loss of three terms."""

    def training_step(self, batch, ctx):
        ctx.add_loss("c", self.p)
        return fg.Output(losses={"a": self.p**2 / 2 * batch["x"].mean(), "b": self.p**2})


@pytest.mark.full
def test_terms_of_the_loss_are_logged_for_each_member_and_over_them():
    population = Population(seeds=(0, 1), vary={"p": [1.0, 2.0]})
    test = Evaluator("test", NUMBERS[:1], every=1)
    result = fit(Terms, NUMBERS, 1, population, test, log_every=1)
    alone = fg.Engine(steps=1, autoload=False, plugins=[test], log_every=1).fit(Terms, NUMBERS)
    expected = {"a": [0.5, 2.0], "b": [1.0, 4.0], "c": [1.0, 2.0], "loss": [2.5, 8.0]}
    for name, values in expected.items():
        metrics = result.metrics["train"]
        np.testing.assert_allclose([metrics[f"{name}[{index}]"] for index in (0, 1)], values)
        np.testing.assert_allclose(metrics[name], np.mean(values))
        np.testing.assert_allclose(metrics[f"{name}/std"], np.std(values))
        tested = result.metrics["test"]
        np.testing.assert_allclose(tested[f"{name}[0]"], alone.metrics["test"][name], rtol=1e-6)
        assert f"{name}/std" in tested


def test_a_metric_of_several_numbers_is_an_error_as_in_a_run_of_its_own():
    class Vector(Point):
        def training_step(self, batch, ctx):
            return fg.Output(self.p**2, metrics={"both": jnp.stack([self.p, self.p])})

    with pytest.raises(ModelError, match=r"'both' is an array of shape \(2,\): return a scalar"):
        fit(Vector, NUMBERS, 1, Population(seeds=(0, 1)))


class Steep(fg.Module):
    """A network whose loss has a factor, by which its gradients overflow in float16."""

    net: eqx.nn.MLP
    factor: jax.Array

    def __init__(self, *, key):
        self.net = eqx.nn.MLP(4, 2, 8, 1, key=key)
        self.factor = jnp.ones((), jnp.int32)

    def training_step(self, batch, ctx):
        losses = (jax.vmap(self.net)(batch["x"]) - batch["y"]) ** 2
        largest = fg.metrics.LastValue.from_values(losses.max())
        return fg.Output(self.factor * losses.mean(), metrics={"largest": largest})

    def configure_optimizers(self):
        return optax.sgd(1e-3)


@pytest.mark.optimized
@pytest.mark.parametrize(
    "exact",
    [pytest.param(True, marks=pytest.mark.full), pytest.param(False, marks=pytest.mark.slow)],
)
def test_a_member_skips_an_overflow_of_its_loss_scale_as_a_run_of_its_own(exact):
    batches = make_batches(20)
    options = {"on_nonfinite": "skip", "log_every": 5}
    population = Population(seeds=(3, 4), vary={"factor": [1, 30]}, exact=exact)
    result = fit(Steep, batches, 20, population, Precision("fp16"), **options)
    assert population.list_frozen(result) == {}
    for index, (seed, factor) in enumerate([(3, 1), (4, 30)]):

        def make(*, key, factor=factor):
            return eqx.tree_at(lambda model: model.factor, Steep(key=key), jnp.int32(factor))

        plugins = [Precision("fp16")]
        engine = fg.Engine(steps=20, seed=seed, plugins=plugins, autoload=False, **options)
        alone = engine.fit(make, batches)
        member = population.take_state(result.state, index, engine.init_state(make, batches))
        if exact:
            assert_same_bits(member.module, alone.module)
        assert_same_bits(member.plugin_states, alone.state.plugin_states)
        metrics = alone.metrics["train"]
        scales = result.metrics["train"]["precision/loss_scale"]
        assert scales[index] == metrics["precision/loss_scale"]
        for name in ("loss", "largest", "skipped_steps"):
            np.testing.assert_allclose(
                result.metrics["train"][f"{name}[{index}]"], metrics[name], rtol=1e-5
            )
    assert result.metrics["train"]["skipped_steps[1]"] > 0


@pytest.mark.full
def test_steps_that_all_members_skip_count_for_each():
    class Bad(Point):
        def training_step(self, batch, ctx):
            return fg.Output(self.p**2 * jnp.where(ctx.step == 1, jnp.nan, 1))

    scale = Precision(compute="float16", scale=Dynamic(initial=8.0))
    population = Population(seeds=(0, 1))
    result = fit(Bad, NUMBERS, 3, population, scale, on_nonfinite="skip", log_every=1)
    metrics = result.metrics["train"]
    assert [metrics[f"skipped_steps[{index}]"] for index in (0, 1)] == [1, 1]
    assert metrics["precision/loss_scale"].tolist() == [4, 4]
    assert metrics["loss/std"] == 0


@pytest.mark.full
def test_members_that_nobody_looks_at_go_on():
    population = Population(seeds=(0, 1), vary={"p": [1.0, np.inf]})
    result = fit(Point, NUMBERS, 2, population, on_nonfinite="ignore")
    np.testing.assert_allclose(result.module.members.p, [0.81, np.nan], rtol=1e-6)
    assert population.list_frozen(result) == {}
    assert population.best(result, "train/loss").index == 0


@pytest.mark.full
def test_adapters_begin_as_in_a_run_of_their_own():
    batches = make_batches(1)
    population = Population(seeds=(3, 5))
    lora = Lora("net.layers[0]", rank=2)
    engine = fg.Engine(steps=1, plugins=[population, lora], autoload=False)
    members = engine.init_state(population.stack(Net), batches).module
    alone = fg.Engine(steps=1, seed=5, plugins=[lora], autoload=False)
    assert_same_bits(members.take(1), alone.init_state(Net, batches).module)


@pytest.mark.full
def test_spikes_are_those_of_the_mean_loss_whatever_the_order():
    for is_first in (True, False):
        spikes = SpikeDetection(factor=1.01, window=1)
        population = Population(seeds=(0, 1), vary={"learning_rate": [0.1, 2.5]})
        plugins = [spikes, population] if is_first else [population, spikes]
        result = fit(Point, NUMBERS, 3, *plugins, log_every=1)
        assert result.metrics["train"]["spike_detection/spikes"] == 2


def test_a_rule_within_cannot_write_a_state_that_members_share():
    class Counting(fg.UpdateRuleWrapper):
        def __call__(self, forward, state, batch, ctx):
            count = state.plugin_states["counter"] + 1
            state, output = self.update_rule(forward, state, batch, ctx)
            return state.replace(plugin_states={**state.plugin_states, "counter": count}), output

    class Counter:
        @fg.hookimpl
        def init_plugin_state(self):
            return jnp.int32(0)

        @fg.hookimpl
        def wrap_update_rule(self, update_rule):
            return Counting(update_rule)

    with pytest.raises(ModelError, match="'counter' writes its state for each member"):
        fit(Point, NUMBERS, 1, Counter(), Population(seeds=(0, 1)))
    fit(Point, NUMBERS, 1, Population(seeds=(0, 1)), Counter())
