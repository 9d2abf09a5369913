"""What evolution multiplies, and what is told of frozen members."""

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_averaging import EMA, Average, Lookahead
from fulgurite_checkpoint import Checkpointer
from fulgurite_evaluators import Evaluator
from fulgurite_optimizers import Freeze
from fulgurite_population import Evolution, Population
from populations import NUMBERS, Fragile, Point, fit, make_bad_batches


class Weighted(Point):
    """A number with momentum, and a factor of its loss."""

    factor: jax.Array
    kind: jax.Array
    learning_rate: jax.Array

    def __init__(self, *, key):
        self.p = jnp.ones(())
        self.factor = jnp.ones(())
        self.kind = jnp.ones((), jnp.int32)
        self.learning_rate = jnp.ones((), jnp.int32)

    def training_step(self, batch, ctx):
        scale = self.factor * self.kind * self.learning_rate
        return fg.Output(self.p**2 / 2 * scale * batch["x"].mean())

    def configure_optimizers(self):
        return optax.inject_hyperparams(optax.sgd)(learning_rate=0.01, momentum=0.5)


def evolve(vary, factors, seed=0):
    """Train eight members for one step, and compare them after it; return the state of all."""
    population = Population(
        seeds=range(8),
        vary={"p": [float(index) for index in range(1, 9)], **vary},
        evolution=Evolution(every=1, monitor="test/loss", share=0.5, factors=factors),
    )
    test = Evaluator("test", NUMBERS[:1], every=1)
    return fit(Weighted, NUMBERS, 2, population, test, Freeze("factor"), seed=seed).state


def read_momentum(state):
    return np.asarray(optax.tree.get(state.opt_state, "momentum"))


@pytest.mark.full
def test_each_hyperparameter_has_a_factor_of_its_own():
    vary = {"momentum": [0.5] * 8, "kind": [10] * 8}
    factors = (0.5, 1.5, 2.0, 3.0)
    state = evolve(vary, factors)
    momentum = read_momentum(state) / 0.5
    kind = np.asarray(state.module.members.kind) / 10
    for ratios in (momentum, kind):
        assert ratios[:4].tolist() == [1] * 4
        assert {*ratios[4:].tolist()} <= {*factors}
        assert len({*ratios[4:].tolist()}) > 1
    assert momentum.tolist() != kind.tolist()
    again = evolve(dict(reversed(vary.items())), factors)
    assert (read_momentum(again) / 0.5).tolist() == momentum.tolist()
    assert (np.asarray(again.module.members.kind) / 10).tolist() == kind.tolist()
    assert (read_momentum(evolve(vary, factors, seed=1)) / 0.5).tolist() != momentum.tolist()


@pytest.mark.full
def test_arrays_of_the_module_that_are_not_trained_are_multiplied():
    vary = {"factor": [1.0] * 8, "kind": [3] * 8, "learning_rate": [1] * 8}
    state = evolve(vary, (1.25,))
    members = state.module.members
    np.testing.assert_allclose(members.factor, [1] * 4 + [1.25] * 4)
    assert members.kind.tolist() == [3] * 4 + [4] * 4  # 3.75, rounded
    assert members.learning_rate.tolist() == [1] * 8
    # The array has the name of a hyperparameter, which does not vary.
    np.testing.assert_allclose(optax.tree.get(state.opt_state, "learning_rate"), 0.01)
    # What is trained is a weight: the worst is a copy of the best, trained once more.
    np.testing.assert_allclose(members.p[7], members.p[0], rtol=0.1)


class Signed(Point):
    """A number whose loss is the batch's sign times it, so that the sign says which is the best."""

    def training_step(self, batch, ctx):
        constant = jax.lax.stop_gradient(self.p * batch["x"].mean())
        return fg.Output(constant + 0 * self.p)


@pytest.mark.full
@pytest.mark.parametrize(("log_every", "every"), [(2, 4), (4, 4)])
def test_members_are_compared_by_the_window_that_ends_at_the_step(log_every, every):
    """The window before, and none before the first, would make the other member the best."""
    signs = [1.0, 1.0, -1.0, -2.0, 1.0]
    data = [{"x": np.full((2, 1), sign, np.float32)} for sign in signs]
    evolution = Evolution(every=every, monitor="train/loss", share=0.5)
    population = Population(seeds=range(2), vary={"p": [1.0, 5.0]}, evolution=evolution)
    result = fit(Signed, data, 5, population, log_every=log_every)
    assert result.module.members.p.tolist() == [5.0, 5.0]


@pytest.mark.full
def test_a_frozen_member_is_reported_once_when_the_metrics_tell_of_it(tmp_path):
    def train(steps, **options):
        messages = []

        class Reader:
            @fg.hookimpl
            def log_record(self, record):
                if record.kind != "text":
                    return
                messages.append((record.step, record.values["message"]))

        population = Population(seeds=range(3), vary={"member": [0, 1, 2]})
        batches = make_bad_batches([-1, 1, -1, -1, 2, -1, -1, -1])
        plugins = [population, Checkpointer(every=4), Reader()]
        engine = fg.Engine(
            steps=steps, plugins=plugins, run_dir=tmp_path, log_every=1, autoload=False
        )
        engine.fit(population.stack(Fragile), batches, **options)
        return [(step, text[:30]) for step, text in messages if "not finite" in text]

    assert train(4) == [(3, "member 1 was not finite at ste")]
    assert train(8, resume="auto") == [(6, "member 2 was not finite at ste")]


@pytest.mark.full
@pytest.mark.parametrize("log_every", [1, 100])
def test_a_frozen_member_is_reported_before_it_is_trained_again(log_every):
    population = Population(
        seeds=range(3),
        vary={"member": [0, 1, 2]},
        evolution=Evolution(every=4, monitor="test/loss"),
    )
    batches = make_bad_batches([-1, 1, -1, -1, -1, -1])
    test = Evaluator("test", make_bad_batches([-1]), every=4)
    result = fit(Fragile, batches, 6, population, test, log_every=log_every)
    assert population.list_frozen(result) == {}
    assert [message[:35] for message in result.messages] == ["member 1 was not finite at step 2; "]


def test_frozen_members_are_reported_at_the_end_without_logging():
    population = Population(seeds=range(3), vary={"member": [0, 1, 2]})
    result = fit(Fragile, make_bad_batches([-1, 1, -1]), 3, population, log_every=None)
    assert len(result.messages) == 1


@pytest.mark.full
def test_members_are_compared_by_what_a_function_measures():
    """The function finds the last member the best, which by its loss is the worst."""

    def measure(state, step):
        return {f"score[{index}]": float(p) for index, p in enumerate(state.module.members.p)}

    def measure_together(state, step):
        return {"score": np.asarray(state.module.members.p)}

    def train(fn):
        evolution = Evolution(every=2, monitor="own/score", mode="max", factors=(0.5,))
        vary = {"learning_rate": [0.4, 0.3, 0.2, 0.1]}
        population = Population(seeds=range(4), vary=vary, evolution=evolution)
        return fit(Point, NUMBERS, 3, population, Evaluator("own", every=2, fn=fn))

    result = train(measure)
    assert [result.history[f"population/parent[{index}]"].item() for index in range(4)] == [
        3,
        1,
        2,
        3,
    ]
    expected = [0.9**2 * 0.95, 0.7**3, 0.8**3, 0.9**3]
    np.testing.assert_allclose(result.module.members.p, expected, rtol=1e-6)
    with pytest.raises(
        ConfigurationError, match=r"'own' measured no score\[0\].* but score: a fun"
    ):
        train(measure_together)


class Still(Point):
    """A number that is not trained, and a factor of its loss."""

    factor: jax.Array

    def __init__(self, *, key):
        self.p = jnp.ones(())
        self.factor = jnp.ones(())

    def training_step(self, batch, ctx):
        return fg.Output(self.p**2 / 2 * self.factor * batch["x"].mean())

    def configure_optimizers(self):
        return optax.sgd(0.0)


@pytest.mark.parametrize(
    ("plugin", "view"), [(Average(EMA(decay=0.9)), "averaged"), (Lookahead(2), "slow")]
)
def test_a_copy_has_what_a_plugin_keeps_of_the_weights_of_its_parent(plugin, view):
    """Nothing is trained, so the copy of the member at 1 is at 1, and so is all that was derived
    from it. What varies and is not trained is 1.25 times that of the parent, also there."""
    population = Population(
        seeds=range(2),
        vary={"p": [10.0, 1.0], "factor": [2.0, 4.0]},
        evolution=Evolution(every=2, monitor="test/loss", share=0.5, factors=(1.25,)),
    )
    test = Evaluator("test", NUMBERS[:1], every=2)
    plugins = (population, test, Freeze("factor"), plugin)
    result = fit(Still, NUMBERS, 3, *plugins, on_nonfinite="ignore")
    for module in (result.module, result.view(view).module):
        assert module.members.p.tolist() == [1.0, 1.0]
        assert module.members.factor.tolist() == [5.0, 4.0]


def test_a_plugin_that_keeps_something_of_each_member_is_refused_beside_evolution():
    class Keeper:
        plugin_name = "keeper"

        @fg.hookimpl
        def init_plugin_state(self, module):
            return {"p": module.members.p}

    evolution = Evolution(every=2, monitor="test/loss")
    population = Population(seeds=range(3), evolution=evolution)
    test = Evaluator("test", NUMBERS[:1], every=2)
    with pytest.raises(ConfigurationError, match="'keeper' keeps arrays with an axis of 3"):
        fit(Point, NUMBERS, 3, population, test, Keeper())


def test_as_many_members_are_replaced_as_the_share_says():
    """0.29 · 100 is 28.999999999999996 in floating-point numbers."""
    for size, share, expected in [(100, 0.29, 29), (50, 0.14, 7), (20, 0.35, 7), (12, 1 / 3, 4)]:
        evolution = Evolution(every=1, monitor="test/loss", share=share)
        values = [float(index) for index in range(size)]
        parents = evolution.choose_parents(values, [True] * size)
        assert sum(parent != index for index, parent in enumerate(parents)) == expected
