"""Clipping, constraints on weights, spectral normalization, and smaller updates on a plateau."""

from typing import Any, cast

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_optimizers import (
    GradientClip,
    ModuleConstraints,
    MultiOptimizer,
    NonNegative,
    Phase,
    ReduceOnPlateau,
    UnitNorm,
    WeightClip,
)
from games import ONE, Pair, bce_loss, engine, fooled, game, played, points, sgd


@pytest.mark.full
def test_gradients_are_clipped_for_each_phase() -> None:
    """At 1, 2 the gradients are 3 and, after x, y - x. By value x moves by 0.5 * 0.5, by norm y by
    0.25 * 0.1."""
    plugins = [
        GradientClip(max_value=0.5, optimizer="min"),
        GradientClip(max_norm=0.1, optimizer="max"),
    ]
    result = engine(*plugins, MultiOptimizer(**sgd(0.5, 0.25)), steps=1).fit(game(), ONE)
    np.testing.assert_allclose(played(result), (0.75, 1.975), rtol=1e-6)
    assert result.metrics["train"]["min/gradient_norm"] == 3
    others = MultiOptimizer(max=sgd(0.5, 0.25)["max"])
    with pytest.raises(ConfigurationError, match="there is no such optimizer"):
        engine(plugins[0], others, steps=1).init_state(game(), ONE)
    both = engine(GradientClip(max_norm=0.1), MultiOptimizer(**sgd(0.5, 0.25)), steps=1).fit(
        game(), ONE
    )
    np.testing.assert_allclose(played(both), (0.95, 1.975), rtol=1e-6)
    for plugins in (
        [MultiOptimizer(**sgd(0.5, 0.25))],
        [MultiOptimizer(**sgd(0.5, 0.25)), GradientClip(max_norm=1.0, optimizer="min")],
    ):
        with pytest.raises(
            ConfigurationError, match="Clip.*'mim'.*there is no such optimizer. Did you mean 'min'"
        ):
            engine(GradientClip(max_norm=1.0, optimizer="mim"), *plugins, steps=1).init_state(
                game(), ONE
            )
    wrong: list[dict[str, Any]] = [
        {},
        {"max_norm": 0.0},
        {"max_norm": 1.0, "max_value": -1.0},
        {"max_norm": "1"},
        {"max_value": True},
    ]
    for arguments in wrong:
        with pytest.raises(ConfigurationError, match="clips nothing"):
            GradientClip(**arguments)


class Weights(fg.Module):
    """Every number is pushed down by its gradient, 1."""

    rows: jax.Array
    other: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.rows.sum() + self.other.sum())

    def configure_optimizers(self) -> Any:
        return optax.sgd(1.0)


class Counted(Weights):
    count: jax.Array
    key: jax.Array


def constrained(*plugins: Any) -> tuple[Any, Any]:
    start = Weights(jnp.asarray([[4.0, 5.0], [1.0, 1.0], [-1.0, 1.0]]), jnp.asarray([0.5, 3.0]))
    module = engine(*plugins, steps=1).fit(start, ONE).module
    return module.rows.tolist(), module.other.tolist()


@pytest.mark.full
def test_constraints_hold_after_every_update() -> None:
    """Before them the rows are 3, 4 and 0, 0 and -2, 0; the rest is -0.5, 2."""
    rows, other = [[3, 4], [0, 0], [-2, 0]], [-0.5, 2]
    assert constrained() == (rows, other)
    np.testing.assert_allclose(
        constrained(UnitNorm("rows"))[0], [[0.6, 0.8], [0, 0], [-1, 0]], rtol=1e-6
    )
    assert constrained(UnitNorm("rows"))[1] == other
    assert constrained(NonNegative("other")) == (rows, [0, 2])
    assert constrained(WeightClip("rows", max_value=2.5)) == ([[2.5, 2.5], [0, 0], [-2, 0]], other)
    in_order = [NonNegative("rows"), WeightClip("**", max_value=1.0)]
    assert constrained(*in_order) == ([[1, 1], [0, 0], [0, 0]], [-0.5, 1])
    counted = Counted(jnp.ones((3, 2)), jnp.ones(2), jnp.arange(-1, 2), jax.random.key(0))
    module = (
        engine(NonNegative("**"), WeightClip("**", max_value=0.5), steps=1).fit(counted, ONE).module
    )
    assert module.count.tolist() == [-1, 0, 1], "only numbers that are trained are constrained"
    with pytest.raises(ConfigurationError, match=r"UnitNorm: an array \[2\] has no axis 1"):
        constrained(UnitNorm("**", axis=1))
    with pytest.raises(ConfigurationError, match="max_value is '1'"):
        WeightClip("rows", max_value=cast(Any, "1"))
    with pytest.raises(ConfigurationError, match="max_value is 0"):
        WeightClip("rows", max_value=0)


class Bounded(eqx.Module):
    """A layer whose weights are in 0 ... 1, and its factor of length 1 with those of its parent."""

    weight: jax.Array

    def constraints(self) -> list[Any]:
        return [NonNegative("weight"), WeightClip("weight", max_value=1.0)]


class Nested(fg.Module):
    inner: dict[str, list[Any]]
    rows: jax.Array
    wanted: Any = eqx.field(static=True)

    def constraints(self) -> Any:
        return self.wanted

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        first, second = self.inner["layers"]
        return fg.Output(first.weight.sum() + second.weight.sum() + self.rows.sum())

    def configure_optimizers(self) -> Any:
        return optax.sgd(1.0)


@pytest.mark.full
def test_layers_of_a_model_ask_for_their_own_constraints() -> None:
    """Each number becomes one less, and is then put into its bounds; the first constraint of the
    outer module sees what those of the layers left."""

    def train(*wanted: Any, plugins: Any) -> list[Any]:
        layers = [Bounded(jnp.asarray([0.5, 4.0])), Bounded(jnp.asarray([1.25, -3.0]))]
        module = Nested({"layers": layers}, jnp.asarray([[4.0, 5.0], [0.0, 1.0]]), wanted)
        trained = engine(*plugins, steps=1).fit(module, ONE).module
        first, second = trained.inner["layers"]
        return [first.weight.tolist(), second.weight.tolist(), trained.rows.tolist()]

    rows = [[3.0, 4.0], [-1.0, 0.0]]
    plugins = [ModuleConstraints()]
    assert train(plugins=[]) == [[-0.5, 3.0], [0.25, -4.0], rows]
    assert train(plugins=plugins) == [[0.0, 1.0], [0.25, 0.0], rows]
    clipped = WeightClip("inner.layers[0].weight", max_value=0.5)
    wanted = (UnitNorm("rows"), clipped)
    first, second, normed = train(*wanted, plugins=plugins)
    assert (first, second) == ([0.0, 0.5], [0.25, 0.0])
    np.testing.assert_allclose(normed, [[0.6, 0.8], [-1.0, 0.0]], rtol=1e-6)
    with pytest.raises(ConfigurationError, match=r"Nested.constraints returned \('rows',\)"):
        train("rows", plugins=plugins)
    with pytest.raises(ConfigurationError, match="no layer of Weights has a method constraints"):
        constrained(ModuleConstraints())


@pytest.mark.full
def test_spectral_normalization_keeps_its_state() -> None:
    """The critic's layer is normalized by Equinox; its state advances with each forward pass of
    each phase."""

    class Normalized(fg.Module):
        generator: eqx.nn.Linear
        discriminator: eqx.nn.SpectralNorm

        def __init__(self, *, key: Any) -> None:
            keys = jax.random.split(key, 3)
            self.generator = eqx.nn.Linear(4, 8, key=keys[0])
            linear = eqx.nn.Linear(8, 3, key=keys[1])
            self.discriminator = eqx.nn.SpectralNorm(linear, "weight", key=keys[2])

        def losses(self, batch: Any, ctx: fg.Context) -> dict[str, Any]:
            fake = jax.vmap(self.generator)(jax.random.normal(ctx.key(), (len(batch), 4)))

            def judged(images: Any, state: Any) -> Any:
                scores, state = jax.vmap(self.discriminator, in_axes=(0, None), out_axes=(0, None))(
                    images, state
                )
                return scores.sum(axis=1), state

            def discriminator() -> fg.Output:
                on_real, state = judged(batch, ctx.model_state)
                on_fake, state = judged(fake, state)
                return fg.Output(bce_loss(on_real, on_fake), model_state=state)

            def generator() -> fg.Output:
                on_fake, state = judged(fake, ctx.model_state)
                return fg.Output(fooled(on_fake), model_state=state)

            return {"discriminator": discriminator, "generator": generator}

    phases: dict[str, Any] = {
        "discriminator": Phase(optax.sgd(0.5), "discriminator"),
        "generator": Phase(optax.sgd(0.01), "generator", every=2),
    }
    make = eqx.nn.make_with_state(Normalized)
    start = make(key=jax.random.key(0))
    result = engine(MultiOptimizer(**phases), steps=200).fit(start, points())
    weight, layer = (
        np.asarray(result.module.discriminator.layer.weight),
        result.module.discriminator,
    )
    assert np.linalg.norm(weight, 2) > 1.2, "the raw weight has grown"
    assert result.model_state is not None
    u, v = result.model_state.get(layer.uv_index)
    np.testing.assert_allclose(
        np.asarray(u) @ weight @ np.asarray(v), np.linalg.norm(weight, 2), rtol=1e-3
    )


@pytest.mark.full
def test_updates_become_smaller_on_a_plateau() -> None:
    """The loss of `x` falls by its step; the metric never improves: after two looks more the step
    is halved."""

    class Falling(fg.Module):
        x: jax.Array

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(self.x)

        def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(metrics={"same": jnp.float32(1)})

        def configure_optimizers(self) -> Any:
            return optax.sgd(1.0)

    class Test:
        @fg.hookimpl
        def register_evaluations(self) -> list[fg.Evaluation]:
            return [fg.Evaluation("test", ONE)]

        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [fg.ScheduledAction("evaluate", 2, self.evaluate, "evaluate")]

        def evaluate(self, run: fg.Run) -> None:
            run.evaluate("test")

    for steps_per_execution in (1, 4):
        plateau = ReduceOnPlateau("test/same", 2, mode="min", factor=0.5, patience=2)
        result = engine(Test(), plateau, steps=12, steps_per_execution=steps_per_execution).fit(
            Falling(jnp.float32(0)), ONE
        )
        assert result.history["reduce_on_plateau/scale"].tolist() == [1, 1, 0.5, 0.5, 0.25, 0.25]
        assert float(result.module.x) == -(6 * 1 + 4 * 0.5 + 2 * 0.25)
    with pytest.raises(
        ConfigurationError, match="there is no metric 'test/some' at step 2.*'test/same'"
    ):
        engine(Test(), ReduceOnPlateau("test/some", 2, mode="min"), steps=2).fit(
            Falling(jnp.float32(0)), ONE
        )
    bad: Any = "most"
    clock, number = fg.EverySeconds(1.0), cast(Any, 3)
    for make in (
        lambda: ReduceOnPlateau("loss", 2),
        lambda: ReduceOnPlateau("a/b", 2, mode=bad),
        lambda: ReduceOnPlateau("a/b", clock, mode="min"),
        lambda: ReduceOnPlateau(number, 2),
        lambda: ReduceOnPlateau("a/b", 2, mode="min", factor=bad),
    ):
        with pytest.raises(ConfigurationError, match="ReduceOnPlateau: "):
            make()


def test_plateaus_of_several_metrics_which_are_numbers() -> None:
    class Test:
        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [fg.ScheduledAction("evaluate", 1, self.evaluate, "evaluate")]

        def evaluate(self, run: fg.Run) -> None:
            metrics = {"each": np.ones(3), "same": 1.0, "less": 1.0}
            run.report_evaluation("test", metrics)

    start = Weights(jnp.ones((3, 2)), jnp.ones(2))
    several = [
        ReduceOnPlateau(f"test/{name}", 1, mode="min", factor=0.5, patience=1)
        for name in ("same", "less")
    ]
    history = engine(Test(), *several, steps=2).fit(start, ONE).history
    for name in ("same", "less"):
        assert history[f"reduce_on_plateau/test/{name}/scale"].tolist() == [1, 0.5]
    with pytest.raises(
        ConfigurationError, match=r"'test/each' is an array \(3,\); choose a metric"
    ):
        engine(Test(), ReduceOnPlateau("test/each", 1, mode="min"), steps=1).fit(start, ONE)


@pytest.mark.full
def test_a_gan_trains_with_all_of_it_fused() -> None:
    phases: dict[str, Any] = {
        name: Phase(optax.adam(1e-3), name) for name in ("discriminator", "generator")
    }
    plugins = [
        MultiOptimizer(**phases),
        GradientClip(max_norm=1.0),
        WeightClip("discriminator", max_value=0.05),
    ]
    result = engine(*plugins, steps=8, steps_per_execution=4).fit(Pair, points())
    weights = jax.tree.leaves(eqx.filter(result.module.discriminator, eqx.is_array))
    assert max(float(abs(weight).max()) for weight in weights) <= np.float32(0.05)
    assert np.isfinite(result.history["train/generator/loss"]).all()
