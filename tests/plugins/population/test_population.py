"""Populations: members, what differs between them, evolution, and mistakes."""

# pyright: reportArgumentType=false

import re
from dataclasses import replace

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, ModelError, NonFiniteError
from fulgurite_averaging import Lookahead
from fulgurite_evaluators import Evaluator
from fulgurite_logging import LearningRateMonitor
from fulgurite_lora import Lora
from fulgurite_optimizers import Freeze, GradientAccumulation
from fulgurite_population import Evolution, Population
from fulgurite_sam import Sam
from fulgurite_testing import TinyModel, check_plugin
from populations import (
    NUMBERS,
    Fragile,
    Net,
    Point,
    fit,
    list_leaves,
    make_bad_batches,
    make_batches,
    sgd,
)

KEY = jax.random.key(0)


def test_each_member_has_its_own_rate():
    population = Population(seeds=(0, 1), vary={"learning_rate": [0.1, 0.2]})
    result = fit(Point, NUMBERS, 3, population, LearningRateMonitor(), log_every=1)
    np.testing.assert_allclose(result.module.members.p, [0.729, 0.512], rtol=1e-6)
    rates = result.history["train/learning_rate/default"]
    np.testing.assert_allclose(rates, [[0.1, 0.2]] * 3, rtol=1e-6)
    # each member's loss, and mean and deviation over them, of the last step.
    metrics = result.metrics["train"]
    losses = np.array([0.81, 0.64]) ** 2 / 2
    np.testing.assert_allclose([metrics["loss[0]"], metrics["loss[1]"]], losses, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], losses.mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["loss/std"], losses.std(), rtol=1e-5)
    assert population.best(result, "train/loss").index == 1


@pytest.mark.full
def test_members_are_runs_of_their_own():
    seeds = (3, 1, 0, 7)
    batches = make_batches(50)
    result = fit(Net, batches, 50, Population(seeds=seeds))
    for index, seed in enumerate(seeds):
        alone = fg.Engine(steps=50, seed=seed, autoload=False).fit(Net, batches)
        member = result.module.take(index)
        for leaf, expected in zip(list_leaves(member), list_leaves(alone.module), strict=True):
            np.testing.assert_allclose(leaf, expected, atol=1e-5)
        loss = result.metrics["train"][f"loss[{index}]"]
        np.testing.assert_allclose(loss, alone.metrics["train"]["loss"], rtol=1e-4)


def fit_fragile(bad_by_step, members=(0, 1, 2)):
    population = Population(seeds=members, vary={"member": members})
    batches = make_bad_batches(bad_by_step)
    return population, fit(Fragile, batches, len(batches), population, log_every=1)


def test_a_member_that_is_not_finite_is_frozen():
    population, result = fit_fragile([-1] * 6 + [1] + [-1] * 3)
    _, healthy = fit_fragile([-1] * 10)
    assert population.list_frozen(result) == {1: 7}
    assert any("member 1" in message for message in result.messages)
    p = np.asarray(result.module.members.p)
    assert (p[[0, 2]] == np.asarray(healthy.module.members.p)[[0, 2]]).all()
    _, without = fit_fragile([-1] * 10, members=(0, 2))
    assert (p[[0, 2]] == np.asarray(without.module.members.p)).all()
    np.testing.assert_allclose(p[1], 0.9**6, rtol=1e-6)
    assert population.best(result, "train/loss").index == 0
    assert population.best(result, "train/loss", "max").index in (0, 2)
    losses = [result.metrics["train"][f"loss[{index}]"] for index in (0, 2)]
    np.testing.assert_allclose(result.metrics["train"]["loss"], np.mean(losses), rtol=1e-6)
    assert result.metrics["train"]["frozen"] == 1


def test_lookahead_is_refused_where_members_may_stay_as_they_are():
    with pytest.raises(ConfigurationError, match="Lookahead moves all members, also one that is"):
        fit(Point, NUMBERS, 2, Population(seeds=(0, 1)), Lookahead(2))
    vary = {"learning_rate": [0.1, 0.2]}
    population = Population(seeds=(0, 1), vary=vary)
    result = fit(Point, NUMBERS, 2, population, Lookahead(2), on_nonfinite="ignore")
    np.testing.assert_allclose(result.module.members.p, [(1 + 0.81) / 2, (1 + 0.64) / 2], rtol=1e-6)


@pytest.mark.full
def test_all_members_not_finite_end_the_fit():
    class Bad(Point):
        def training_step(self, batch, ctx):
            return fg.Output(self.p * jnp.nan)

    with pytest.raises(NonFiniteError):
        fit(Bad, NUMBERS, 3, Population(seeds=range(2)))


@pytest.mark.full
def test_a_member_continues_as_a_run_of_its_own():
    population = Population(seeds=(5, 6), vary={"learning_rate": [0.1, 0.2]})
    result = fit(Point, NUMBERS, 3, population)
    engine = fg.Engine(steps=1, autoload=False)
    state = population.take_state(result.state, 1, engine.init_state(Point, NUMBERS))
    assert int(state.step) == 3
    np.testing.assert_allclose(engine.evaluate(state, NUMBERS)["loss"], 0.512**2 / 2, rtol=1e-6)
    continued = engine.fit(data=NUMBERS * 2, state=state)
    np.testing.assert_allclose(continued.module.p, 0.8**4, rtol=1e-6)


def test_what_is_no_array_cannot_differ():
    with pytest.raises(ConfigurationError, match="cannot be vmapped: use a sweep"):
        fit(Point, NUMBERS, 1, Population(seeds=range(2), vary={"width": [16, 32]}))
    with pytest.raises(ConfigurationError, match="cannot be vmapped: use a sweep"):
        Population(seeds=range(2), vary={"activation": [jax.nn.relu, jax.nn.tanh]})

    widths = iter([8, 16] * 9)

    def make(*, key):
        return fg.Task(
            eqx.nn.Linear(next(widths), 1, key=key), loss=lambda preds, batch: preds, optimizer=None
        )

    with pytest.raises(ConfigurationError, match="use a sweep"):
        Population(seeds=range(2)).stack(make)(key=jax.random.key(0))


@pytest.mark.full
def test_gradients_are_clipped_for_each_member():
    class Clip:
        @fg.hookimpl
        def gradient_transform(self):
            return optax.clip_by_global_norm(0.5)

    population = Population(seeds=range(2), vary={"p": [1.0, 0.1]})
    result = fit(Point, NUMBERS, 1, population, Clip())
    np.testing.assert_allclose(result.module.members.p, [0.95, 0.09], rtol=1e-6)


def test_arrays_are_named_by_their_paths():
    biases = np.arange(16, dtype=np.float32).reshape(2, 8)
    population = Population(seeds=range(2), vary={"net.layers[0].bias": biases, "scale": [1, 2]})
    members = population.stack(Net)(key=jax.random.key(0)).members
    np.testing.assert_array_equal(members.net.layers[0].bias, biases)
    assert members.scale.tolist() == [1, 2]
    for name, meant in {
        "net.layers[0].bais": "net.layers[0].bias",
        "learning_rat": "learning_rate",
    }.items():
        with pytest.raises(ConfigurationError, match=re.escape(f"Did you mean {meant!r}?")):
            fit(Net, make_batches(1), 1, Population(seeds=range(2), vary={name: [0.0, 1.0]}))


class Grouped(fg.Module):
    """Two numbers with the losses x²/2 and y²/2, and an optimizer of its own for each."""

    x: jax.Array
    y: jax.Array

    def __init__(self, *, key):
        self.x, self.y = jnp.ones(()), jnp.ones(())

    def training_step(self, batch, ctx):
        return fg.Output((self.x**2 + self.y**2) / 2 * batch["x"].mean())

    def configure_optimizers(self):
        labels = eqx.tree_at(lambda model: (model.x, model.y), self, ("head", "backbone"))
        return optax.multi_transform({"head": sgd(0.1), "backbone": sgd(0.01)}, labels)


def test_the_rate_of_each_part_varies_by_the_name_of_its_optimizer():
    vary = {"head/learning_rate": [0.1, 0.2], "backbone/learning_rate": [0.01, 0.02]}
    result = fit(Grouped, NUMBERS, 2, Population(seeds=(0, 1), vary=vary))
    np.testing.assert_allclose(result.module.members.x, [0.9**2, 0.8**2], rtol=1e-6)
    np.testing.assert_allclose(result.module.members.y, [0.99**2, 0.98**2], rtol=1e-6)
    both = Population(seeds=(0, 1), vary={"learning_rate": [0.1, 0.2]})
    result = fit(Grouped, NUMBERS, 2, both)
    np.testing.assert_allclose(result.module.members.y, [0.9**2, 0.8**2], rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "vary"),
    [
        (Net, {"scale": [0.5, 1.9]}),
        (Net, {"scale": [1, 2**40]}),
        (Point, {"p": [1.0, 1e300]}),
        (Point, {"p": [1.0, 1j]}),
        (Point, {"learning_rate": [1.0, 1e300]}),
    ],
)
def test_numbers_that_an_array_cannot_hold_are_an_error(model, vary):
    with pytest.raises(ConfigurationError, match="that it replaces cannot hold"):
        fit(model, make_batches(1) if model is Net else NUMBERS, 1, Population((0, 1), vary))


class Scheduled(Point):
    """A number whose rate has a schedule, which another number scales."""

    def configure_optimizers(self):
        scale = optax.inject_hyperparams(optax.scale)(step_size=1.0)
        return optax.chain(sgd(lambda step: 0.1), scale)


def test_a_scheduled_hyperparameter_varies_by_a_scale():
    population = Population(seeds=range(2), vary={"step_size": [1.0, 2.0]})
    result = fit(Scheduled, NUMBERS, 2, population)
    np.testing.assert_allclose(result.module.members.p, [0.81, 0.64], rtol=1e-6)
    with pytest.raises(ConfigurationError, match="a schedule recomputes at each step.*chain"):
        fit(Scheduled, NUMBERS, 1, Population(seeds=range(2), vary={"learning_rate": [0.1, 0.2]}))


@pytest.mark.full
@pytest.mark.parametrize(
    "make_plugin",
    [
        Sam,
        pytest.param(lambda: Lora("net", rank=2), marks=pytest.mark.full),
        pytest.param(lambda: Freeze("net.layers[0]"), marks=pytest.mark.full),
        pytest.param(lambda: GradientAccumulation(2), marks=pytest.mark.full),
    ],
)
def test_plugins_that_wrap_the_rule_may_be_listed_in_any_order(make_plugin):
    results = []
    for is_first in (True, False):
        population = Population(seeds=range(2))
        plugins = [make_plugin(), population] if is_first else [population, make_plugin()]
        results.append(fit(Net, make_batches(2), 2, *plugins))
    for leaf, expected in zip(*(list_leaves(result.module) for result in results), strict=True):
        np.testing.assert_allclose(leaf, expected, atol=1e-6)


def test_a_rule_around_the_population_that_takes_it_apart_is_named():
    class Other:
        @fg.hookimpl
        def wrap_update_rule(self, update_rule):
            return Sam().wrap_update_rule(update_rule)

    with pytest.raises(ModelError, match="list that plugin before Population"):
        fit(Point, NUMBERS, 1, Population(seeds=range(2)), Other())


def test_best_says_what_it_needs():
    population = Population(seeds=range(2), vary={"p": [1.0, 2.0]})
    result = fit(Point, NUMBERS, 1, population)
    assert population.best(result, "train/loss").index == 0
    assert population.best(result, "train/loss", "max").index == 1
    with pytest.raises(ConfigurationError, match=r"write SOURCE/NAME.*Did you mean 'train/loss'"):
        population.best(result, "loss")
    with pytest.raises(ConfigurationError, match=r"metric 'train/los'. Did you mean 'train/loss'"):
        population.best(result, "train/los")
    with pytest.raises(ConfigurationError, match="result is a TrainState; give what fit returned"):
        population.best(result.state, "train/loss")
    named = replace(result, metrics={"test": {"acc[0]": 0.1, "acc[1]": 0.9}})
    with pytest.raises(ConfigurationError, match="give mode='max' or mode='min'"):
        population.best(named, "test/acc")
    accurate = replace(result, metrics={"test": {"accuracy[0]": 0.1, "accuracy[1]": 0.9}})
    assert population.best(accurate, "test/accuracy").index == 1


@pytest.mark.variants("full")
@pytest.mark.parametrize(
    ("monitor", "log_every", "message"),
    [
        ("tst/loss", 1, "there is no evaluator 'tst'"),
        ("train/los", 1, "Did you mean 'train/loss'"),
        (
            "train/loss",
            3,
            "'train/loss' decides at step 2, and no metric window ends there",
        ),
        ("train/loss", None, "decides at step 2, and no metric window ends there"),
        ("test/loss", 1, "decides at step 2, and 'test' is not evaluated there"),
    ],
)
def test_evolution_is_checked_before_the_first_step(monitor, log_every, message):
    evolution = Evolution(every=2, monitor=monitor, mode="min")
    population = Population(seeds=range(2), evolution=evolution)
    test = Evaluator("test", NUMBERS[:1], every=3)
    with pytest.raises(ConfigurationError, match=message):
        fit(Point, NUMBERS, 3, population, test, log_every=log_every)


def test_evolution_orders_members():
    evolution = Evolution(every=1, monitor="train/loss", share=0.5)
    assert evolution.mode == "min"
    assert Evolution(every=1, monitor="test/accuracy").mode == "max"
    assert evolution.choose_parents([3.0, 1.0, 2.0, 4.0], [True] * 4) == [2, 1, 2, 1]
    assert evolution.choose_parents([1.0] * 4, [True] * 4) == [0, 1, 2, 3]
    best_is_large = replace(evolution, mode="max", share=0.25)
    assert best_is_large.choose_parents([3.0, 1.0, 2.0, 4.0], [True] * 4) == [0, 3, 2, 3]
    nan = float("nan")
    assert evolution.choose_parents([nan, 1.0, 2.0, 3.0], [True, True, False, True]) == [3, 1, 1, 3]
    infinite = -float("inf")
    assert evolution.choose_parents([infinite, -1.0, -2.0, 3.0], [True] * 4) == [2, 1, 2, 1]
    assert best_is_large.choose_parents([-1.0, nan, -infinite, -2.0], [True] * 4) == [0, 1, 0, 3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Population(seeds=()), "one integer"),
        (lambda: Population(seeds=(-1,)), "one integer"),
        (lambda: Population(seeds=4), "one integer"),
        (lambda: Population(seeds=(1, 2**32)), "one integer of 32 bits"),
        (lambda: Population(seeds=(1, 1)), "members of the same seed are the same"),
        (lambda: Population(seeds=(0, 1), vary={"learning_rate": [1]}), "give one for each"),
        (lambda: Population(seeds=(0, 1), vary={"learning_rate": 0.1}), "a list with one value"),
        (lambda: Population(seeds=(0, 1), vary={"learning_rate": "ab"}), "a list with one value"),
        (lambda: Population(seeds=(0, 1), vary={"learning_rate": ["a", "b"]}), "give numbers"),
        (lambda: Population(seeds=(0, 1), vary=["learning_rate"]), "values of all members by name"),
        (lambda: Population(seeds=(0, 1), exact="yes"), "exact is 'yes'; choose True or False"),
        (lambda: Population(seeds=(0, 1), evolution=50), "give an Evolution"),
        (lambda: Population(seeds=(0, 1, 2), num_devices=2), "must divide"),
        (lambda: Population(seeds=(0, 1), num_devices="all"), "positive integer"),
        (
            lambda: Population(seeds=(0, 1), num_devices=2, exact=True),
            "several devices cannot share",
        ),
        (
            lambda: Population(seeds=(0, 1)).stack(Point(key=KEY)),
            "model is a Point; give what makes",
        ),
        (lambda: Evolution(every=0, monitor="a/loss"), "positive integer"),
        (lambda: Evolution(every=1, monitor="loss"), "write SOURCE/NAME"),
        (lambda: Evolution(every=1, monitor="a/loss[0]"), "without an index"),
        (lambda: Evolution(every=1, monitor="a/acc"), "give mode='max' or mode='min'"),
        (lambda: Evolution(every=1, monitor="a/loss", share=0.9), "share"),
        (lambda: Evolution(every=1, monitor="a/loss", factors=()), "positive"),
        (lambda: Evolution(every=1, monitor="a/loss", factors=("a",)), "positive"),
        (lambda: Evolution(1, "a/loss", mode="best"), "mode"),
        (lambda: Population(seeds=(0,), evolution=Evolution(1, "a/loss")), "two members"),
    ],
)
def test_mistakes_are_found_early(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_model_and_plugin_must_both_be_of_the_population():
    population = Population(seeds=range(2))
    with pytest.raises(ModelError, match=r"engine\.fit\(population\.stack\(model\), data\)"):
        fg.Engine(steps=1, plugins=[population]).fit(Point, NUMBERS)
    with pytest.raises(ModelError, match="trained by its plugin"):
        fg.Engine(steps=1).fit(population.stack(Point), NUMBERS)
    with pytest.raises(ConfigurationError, match="no member 2"):
        population.stack(Point)(key=jax.random.key(0)).take(2)


@pytest.mark.full
def test_plugin_passes_the_conformance_check():
    population = Population(seeds=range(2))
    check_plugin(
        lambda: Population(seeds=range(2)),
        bad_arguments=[{"seeds": ()}],
        model=population.stack(TinyModel),
    )
