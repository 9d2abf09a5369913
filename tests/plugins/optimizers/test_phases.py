"""Several optimizers in one step, against numbers by hand."""

from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, DataError, ModelError, PathError, PluginError
from fulgurite_optimizers import GradientAccumulation, MultiOptimizer, Phase
from games import (
    ONE,
    Apart,
    Compiled,
    Game,
    Heads,
    HeadsApart,
    Pair,
    PairApart,
    Show,
    bce_loss,
    engine,
    fooled,
    game,
    picture,
    played,
    points,
    sgd,
)


def fit(*plugins: Any, model: Any = None, steps: int = 2, **settings: Any) -> fg.FitResult:
    return engine(*plugins, steps=steps, log_every=1, **settings).fit(
        game() if model is None else model, ONE
    )


# --- by hand --------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("kind", [Game, Apart])
def test_alternating_phases_see_the_update_before(kind: Any) -> None:
    """x: 1 - (1 + 2)/2 = -0.5, y: 2 - (2 + 0.5)/4 = 1.375; x: -0.5 - 0.875/2 = -0.9375, y: 1.375 -
    2.3125/4."""
    for steps, expected in ((1, (-0.5, 1.375)), (2, (-0.9375, 0.796875))):
        assert (
            played(fit(MultiOptimizer(**sgd(0.5, 0.25)), model=game(kind=kind), steps=steps))
            == expected
        )


@pytest.mark.full
@pytest.mark.parametrize("kind", [pytest.param(Game, marks=pytest.mark.full), Apart])
def test_simultaneous_phases_see_the_same_parameters(kind: Any) -> None:
    """x: 1 - 3/2 = -0.5, y: 2 - (2 - 1)/4 = 1.75; x: -0.5 - 1.25/2 = -1.125, y: 1.75 - 2.25/4 =
    1.1875."""
    for steps, expected in ((1, (-0.5, 1.75)), (2, (-1.125, 1.1875))):
        result = fit(
            MultiOptimizer(order="simultaneous", **sgd(0.5, 0.25)),
            model=game(kind=kind),
            steps=steps,
        )
        assert played(result) == expected


@pytest.mark.variants("full")
@pytest.mark.parametrize("kind", [Game, Apart])
@pytest.mark.parametrize("order", ["alternating", "simultaneous"])
@pytest.mark.parametrize("steps_per_execution", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_phase_runs_with_every_kth_update(
    kind: Any, order: Any, steps_per_execution: int
) -> None:
    """x: 1, -0.5, -1.25 while y is 2; then y is 2 - (2 + 1.25)/4, or simultaneously 2 - (2 +
    0.5)/4."""
    phases = MultiOptimizer(order=order, **sgd(0.5, 0.25, every=2))
    result = fit(phases, model=game(kind=kind), steps=3, steps_per_execution=steps_per_execution)
    y = 1.1875 if order == "alternating" else 1.375
    assert played(result) == (-1.25 - (-1.25 + y) / 2, y)
    history = result.history
    assert history["train/max/updates"].tolist() == [0, 1, 1]
    assert history["train/min/updates"].tolist() == [1, 2, 3]
    assert int(result.state.step) == 3
    np.testing.assert_array_equal(
        history["train/max/gradient_norm"], [np.nan, 3.25 if y == 1.1875 else 2.5, np.nan]
    )
    assert history["train/min/loss"][0] == 2.5
    if kind is Game:
        assert history["train/product"][0] == 2
    else:
        assert np.isnan(history["train/max/product"]).tolist() == [True, False, True]


@pytest.mark.full
def test_a_phase_may_repeat_its_update_in_a_step() -> None:
    """x: 1, -0.5, -1.25; y: 2 - 3.25/4 = 1.1875. The loss is the mean of 2.5 and 0.125 - 1 =
    -0.875."""
    result = fit(
        MultiOptimizer(min=Phase(optax.sgd(0.5), "x", repeat=2), max=Phase(optax.sgd(0.25), "y")),
        steps=1,
    )
    assert played(result) == (-1.25, 1.1875)
    assert result.metrics["train"]["min/loss"] == (2.5 - 0.875) / 2
    assert result.metrics["train"]["min/updates"] == 2


class Mean(fg.Module):
    """Goes where the batch is: its gradient is the parameter less the mean of the batch."""

    place: jax.Array
    other: jax.Array

    def losses(self, batch: Any, ctx: fg.Context) -> dict[str, Any]:
        drawn = jax.random.uniform(ctx.key())
        return {
            "place": lambda: fg.Output(
                ((self.place - batch) ** 2).mean(where=ctx.mask) / 2, metrics={"drawn": drawn}
            ),
            "other": lambda: fg.Output(self.other**2, metrics={"drawn": drawn}),
        }


@pytest.mark.full
def test_repetitions_may_share_the_batch() -> None:
    """Of 1, 2, 3, 6 the first half is 1 and 3, the second 2 and 6: 0 + (2 - 0)/2 = 1, then 1 + (4 -
    1)/2."""
    phases = MultiOptimizer(
        place=Phase(optax.sgd(0.5), "place", repeat=2, split=True),
        other=Phase(optax.sgd(0.1), "other", every=1),
    )
    batch = [np.asarray([1, 2, 3, 6], np.float32)]
    result = engine(phases, steps=1).fit(Mean(jnp.float32(0), jnp.float32(1)), batch)
    assert float(result.module.place) == 2.5
    part = [fg.Batch(np.asarray([3, 0, 0, 0], np.float32), np.asarray([True, False, False, False]))]
    padded = engine(phases, steps=1).fit(Mean(jnp.float32(0), jnp.float32(1)), part)
    assert float(padded.module.place) == 1.5, "the second half is padding alone"
    assert padded.metrics["train"]["place/loss"] == 4.5
    odd = [np.asarray([1, 2, 3], np.float32)]
    with pytest.raises(DataError, match=r"shape \[3\] cannot be split into 2 parts"):
        engine(phases, steps=1).fit(Mean(jnp.float32(0), jnp.float32(1)), odd)


class IsUpdate:
    """Logs whether a step changed the weights, as averages of them ask."""

    plugin_name = "is_update"

    @fg.hookimpl
    def step_metrics(self, output: fg.Output) -> dict[str, Any]:
        assert output.is_update is not None
        return {"value": fg.metrics.LastValue.from_values(output.is_update)}


@pytest.mark.full
@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        # Nothing changes in three of four steps.
        (
            {
                "min": Phase(optax.sgd(0.1), "x", accumulate=GradientAccumulation(4, "steps")),
                "max": Phase(optax.sgd(0.1), "y", every=4),
            },
            [0, 0, 0, 1, 0, 0],
        ),
        # Two gradients a step: the third one is the first of step 2, the sixth the last of step 3.
        (
            {
                "min": Phase(
                    optax.sgd(0.1), "x", repeat=2, accumulate=GradientAccumulation(3, "steps")
                ),
                "max": Phase(optax.sgd(0.1), "y", every=6),
            },
            [0, 1, 1, 0, 1, 1],
        ),
    ],
    ids=["waiting", "repeated"],
)
def test_a_step_is_an_update_if_any_phase_has_made_one(phases: Any, expected: list[int]) -> None:
    history = fit(MultiOptimizer(**phases), IsUpdate(), steps=6).history
    assert history["train/is_update/value"].tolist() == expected
    updates = np.diff(history["train/min/updates"] + history["train/max/updates"], prepend=0)
    assert (updates > 0).tolist() == [bool(value) for value in expected]


def test_examples_that_nobody_counts_are_not_shared_by_repetitions() -> None:
    phases = MultiOptimizer(
        place=Phase(optax.sgd(0.5), "place", repeat=2, split=True),
        other=Phase(optax.sgd(0.1), "other"),
    )
    batch = [fg.Batch(np.ones(4, np.float32), num_examples=3)]
    with pytest.raises(DataError, match="'place' has split=True, and a fg.Batch with num_examples"):
        engine(phases, steps=1).init_state(Mean(jnp.float32(0), jnp.float32(1)), batch)


class Masked(fg.Module):
    x: jax.Array
    y: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        make = fg.metrics.Mean.from_values
        return fg.Output(
            losses={"min": make(self.x * batch, ctx.mask), "max": make(self.y * batch, ctx.mask)}
        )


@pytest.mark.full
@pytest.mark.parametrize("order", ["alternating", "simultaneous"])
def test_a_batch_of_padding_is_no_part_of_the_average_of_losses(order: Any) -> None:
    batches = [
        fg.Batch(np.full(2, value, np.float32), np.full(2, is_example))
        for value, is_example in ((9, False), (4, True), (9, False), (2, True))
    ]
    trainer = engine(MultiOptimizer(order=order, **sgd(0, 0)), steps=4, log_every=1)
    history = trainer.fit(game(kind=Masked), batches).history
    for name, factor in (("min", 1), ("max", 2)):
        expected = factor * np.array([np.nan, 4, 4, 3])
        np.testing.assert_allclose(history[f"train/{name}/loss_average"], expected, rtol=1e-6)


@pytest.mark.full
def test_phases_and_repetitions_draw_distinct_numbers() -> None:
    def drawn(repeat: int, seed: int = 0) -> tuple[float, float]:
        phases = MultiOptimizer(
            place=Phase(optax.sgd(0.5), "place", repeat=repeat),
            other=Phase(optax.sgd(0.1), "other"),
        )
        result = engine(phases, steps=1, seed=seed).fit(Mean(jnp.float32(0), jnp.float32(1)), ONE)
        return result.metrics["train"]["place/drawn"], result.metrics["train"]["other/drawn"]

    assert drawn(1)[0] != drawn(1)[1]
    assert drawn(1)[1] == drawn(2)[1]
    assert drawn(1)[0] != drawn(2)[0]


@pytest.mark.full
def test_each_phase_counts_its_own_updates_for_schedules() -> None:
    """The rate of the n-th update is 1/n; `max` has had one update where `min` has had two."""

    def rate(count: Any) -> Any:
        return 1 / (count + 1)

    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
    result = fit(
        MultiOptimizer(min=Phase(optimizer, "x"), max=Phase(optimizer, "y", every=2)), steps=4
    )
    np.testing.assert_allclose(result.history["train/min/learning_rate"], [1, 1 / 2, 1 / 3, 1 / 4])
    np.testing.assert_allclose(result.history["train/max/learning_rate"], [1, 1, 1, 1 / 2])


def test_module_may_define_phases() -> None:
    class Own(Game):
        def configure_optimizers(self) -> Any:
            return {
                "min": fg.OptimizerSpec(optax.sgd(0.5), "x"),
                "max": Phase(optax.sgd(0.25), lambda m: m.y, every=2),
            }

    assert played(fit(MultiOptimizer(), model=game(kind=Own), steps=2)) == (-1.25, 1.1875)


def test_overlapping_phases_add_up_where_that_is_wanted() -> None:
    """Both gradients at x = 1, y = 2: x by `min` 3/2, by `max` y'x = -2/4."""
    phases = {"min": Phase(optax.sgd(0.5), "x"), "max": Phase(optax.sgd(0.25))}
    result = fit(MultiOptimizer(order="simultaneous", overlap=True, **phases), steps=1)
    assert played(result) == (1 - 1.5 + 0.5, 1.75)


@pytest.mark.full
def test_terms_of_plugins_are_addressed_by_phase() -> None:
    class Decay:
        @fg.hookimpl
        def loss_terms(self, module: Any) -> dict[str, Any]:
            return {"min/l2": module.x**2, "max/l2": module.y**2}

    for kind in (Game, Apart):
        result = fit(MultiOptimizer(**sgd(0.5, 0.25)), Decay(), model=game(kind=kind), steps=1)
        assert played(result) == (1 - 0.5 * (3 + 2), 2 - 0.25 * (2 + 1.5 + 4))
        assert result.metrics["train"]["min/l2"] == 1 and result.metrics["train"]["min/loss"] == 3.5
        assert "loss" not in result.metrics["train"]


def test_single_phase_named_loss_receives_plugin_terms() -> None:
    class Plain(Game):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(3 * self.x)

    class Decay:
        @fg.hookimpl
        def loss_terms(self, module: Any) -> dict[str, Any]:
            return {"l2": module.x**2}

    result = fit(
        MultiOptimizer(loss=Phase(optax.sgd(0.1), "x")), Decay(), model=game(kind=Plain), steps=1
    )
    assert played(result) == (pytest.approx(1 - 0.1 * (3 + 2)), 2)


class ByFunctions(fg.Module):
    """No `training_step`: what is trained is what `losses` gives."""

    x: jax.Array
    y: jax.Array

    def losses(self, batch: Any, ctx: fg.Context) -> dict[str, Any]:
        def largest() -> fg.Output:
            ctx.add_loss("max/l2", self.y**2)
            return fg.Output(self.y * batch.sum(), metrics={"sum": batch.sum()}, preds=batch)

        return {"min": lambda: self.x * batch.mean(), "max": largest}


@pytest.mark.full
def test_losses_are_evaluated_too() -> None:
    data, plugin = (
        [np.asarray([1.0, 2.0, 3.0], np.float32), np.asarray([5.0], np.float32)],
        MultiOptimizer(**sgd(0.5, 0.25)),
    )
    module = ByFunctions(jnp.float32(2), jnp.float32(3))
    numbers = engine(plugin).evaluate(module, data)
    assert numbers == {"min": 5.5, "max": 17.25, "max/l2": 9, "max/sum": 5.75, "loss": 31.75}
    metrics = engine().evaluate(
        module, data, metrics={"twice": lambda preds, batch: 2 * preds}, losses={}
    )
    assert metrics["twice"] == 5.5
    assert engine().predict(module, data).tolist() == [1, 2, 3, 5]


# --- mistakes -------------------------------------------------------------------------------------


def test_losses_and_optimizers_belong_together() -> None:
    x, y = Phase(optax.sgd(0.1), "x"), Phase(optax.sgd(0.1), "y")
    for kind in (Game, Apart):
        with pytest.raises(
            ModelError, match="the loss 'max' has no optimizer.*MultiOptimizer\\(max="
        ):
            engine(MultiOptimizer(min=x, mix=y), steps=1).init_state(game(kind=kind), ONE)
        with pytest.raises(
            ModelError, match="the optimizer 'third' has no loss; the module gives min, max"
        ):
            third = Phase(optax.sgd(0.1), "z")
            engine(MultiOptimizer(min=x, max=y, third=third), steps=1).init_state(
                Three(*map(jnp.float32, (1, 2, 3))), ONE
            )
        with pytest.raises(
            ModelError, match="the loss 'max' has no optimizer; there are phases for min"
        ):
            engine(MultiOptimizer(min=x), steps=1).init_state(game(kind=kind), ONE)
    with pytest.raises(
        ConfigurationError, match="'min' and 'max' both update x: select other arrays"
    ):
        engine(MultiOptimizer(min=x, max=Phase(optax.sgd(0.1))), steps=1).init_state(game(), ONE)
    with pytest.raises(PathError, match="'z' selects no array of Game"):
        engine(MultiOptimizer(min=x, max=Phase(optax.sgd(0.1), "z")), steps=1).init_state(
            game(), ONE
        )


class Three(Game):
    z: jax.Array


def test_losses_must_be_named_functions_and_every_term_needs_a_phase() -> None:
    class Giving(Apart):
        gives: Any = eqx.field(static=True)

        def losses(self, batch: Any, ctx: fg.Context) -> Any:
            return self.gives(self, ctx)

    def l2(module: Any, ctx: fg.Context) -> Any:
        ctx.add_loss("l2", module.x**2)
        return module.x

    cases: list[tuple[Any, str]] = [
        (
            lambda module, ctx: {"min": lambda: l2(module, ctx), "max": lambda: module.y},
            "the loss 'l2' has no optimizer",
        ),
        (
            lambda module, ctx: {
                "min": lambda: fg.Output(module.x, losses={"l2": module.x}),
                "max": lambda: module.y,
            },
            "the loss 'l2' has no optimizer",
        ),
        (
            lambda module, ctx: [module.x, module.y],
            "Giving.losses returned list: return a dictionary of functions",
        ),
        (
            lambda module, ctx: {"min": module.x, "max": module.y},
            "Giving.losses returned an array for 'min': return a function",
        ),
        (
            lambda module, ctx: {
                "min": lambda: fg.Output(losses={"max/l2": module.x}),
                "max": lambda: module.y,
            },
            "the phase 'min' got no loss",
        ),
    ]
    for gives, message in cases:
        with pytest.raises(ModelError, match=message):
            engine(MultiOptimizer(**sgd(0.5, 0.25)), steps=1).init_state(
                Giving(jnp.float32(1), jnp.float32(2), gives), ONE
            )


@pytest.mark.parametrize("name", ["loss", "gradient_norm", "updates"])
def test_metric_names_of_phases_are_reserved(name: str) -> None:
    class Named(Apart):
        def losses(self, batch: Any, ctx: fg.Context) -> dict[str, Any]:
            return {
                **super().losses(batch, ctx),
                "max": lambda: fg.Output(self.y**2, metrics={name: self.x}),
            }

    with pytest.raises(ModelError, match=f"'max/{name}' is recorded of every phase"):
        engine(MultiOptimizer(**sgd(0.5, 0.25)), steps=1).init_state(game(kind=Named), ONE)


@pytest.mark.full
def test_optimizer_of_unused_parameters_is_reported() -> None:
    phases = MultiOptimizer(
        min=Phase(optax.sgd(0.5), fg.select("x", "z")), max=Phase(optax.sgd(0.25), "y")
    )
    for order in ("alternating", "simultaneous"):
        phases = MultiOptimizer(
            order=order,
            min=Phase(optax.sgd(0.5), fg.select("x", "z")),
            max=Phase(optax.sgd(0.25), "y"),
        )
        with pytest.warns(UserWarning, match="phase 'min' does not depend on z") as caught:
            engine(phases, steps=3).fit(Three(*map(jnp.float32, (1, 2, 3))), ONE)
        assert len(caught) == 1


def test_invalid_phases_are_errors() -> None:
    sgd = optax.sgd(0.1)
    for make in (
        lambda: Phase(sgd, every=0),
        lambda: Phase(sgd, repeat=True),
        lambda: Phase(sgd, split=True),
    ):
        with pytest.raises(ConfigurationError):
            make()
    bad: Any = optax.sgd
    with pytest.raises(ConfigurationError, match="OptimizerSpec: optimizer is <function sgd"):
        Phase(bad)
    bad = 4
    with pytest.raises(
        ConfigurationError, match=r"Phase: accumulate is 4; pass GradientAccumulation\(4\)"
    ):
        Phase(sgd, accumulate=bad)
    bad = "both"
    with pytest.raises(ConfigurationError, match="order is 'both'"):
        MultiOptimizer(order=bad)
    bad = sgd
    with pytest.raises(ConfigurationError, match="min is"):
        MultiOptimizer(min=bad)
    with pytest.raises(ConfigurationError, match="1 argument by position .* by the name of its"):
        MultiOptimizer(Phase(sgd))  # pyright: ignore[reportCallIssue]
    bad = "yes"
    with pytest.raises(ConfigurationError, match="overlap is 'yes'"):
        MultiOptimizer(overlap=bad)
    cases = [
        (
            MultiOptimizer(min=Phase(sgd, "x", every=2), max=Phase(sgd, "y", every=3)),
            ConfigurationError,
            "every=1",
        ),
        (
            MultiOptimizer(
                order="simultaneous", min=Phase(sgd, "x", repeat=2), max=Phase(sgd, "y")
            ),
            ConfigurationError,
            "min",
        ),
    ]
    for phases, kind, message in cases:
        with pytest.raises(kind, match=message):
            engine(phases, steps=1).init_state(game(), ONE)
    whole = Three(jnp.float32(1), jnp.float32(2), jnp.int32(3))
    with pytest.raises(
        ConfigurationError, match="the phase 'max' selects no array of floating-point numbers"
    ):
        engine(MultiOptimizer(min=Phase(sgd, "x"), max=Phase(sgd, "z")), steps=1).init_state(
            whole, ONE
        )
    several = {"min": Phase(sgd, "x"), "max": Phase(sgd, "y")}
    plugin = type("Given", (), {"configure_optimizers": fg.hookimpl(lambda self: several)})()
    with pytest.raises(PluginError, match=r"min, max need an update rule.*MultiOptimizer\(\)"):
        engine(plugin, steps=1).init_state(game(), ONE)
    with pytest.raises(PluginError, match=r"Phase\(..., accumulate=GradientAccumulation\(2\)\)"):
        engine(plugin, GradientAccumulation(2), steps=1).init_state(game(), ONE)


@pytest.mark.full
def test_running_metrics_rest_while_their_phase_does_not_run_G8() -> None:
    """y is 2 at steps 1 and 2, and 2 - 4/4 = 1 from then on; the loss is its square. The average
    of the second value takes half of each."""

    class Running(Apart):
        def losses(self, batch: Any, ctx: fg.Context) -> dict[str, Any]:
            last = fg.metrics.LastValue.from_values(self.y)
            return {
                **super().losses(batch, ctx),
                "max": lambda: fg.Output(self.y**2, metrics={"last": last}),
            }

    history = fit(
        MultiOptimizer(**sgd(0.5, 0.25, every=2)), model=game(kind=Running), steps=4
    ).history
    expected = {"max/last": (2, 2, 1), "max/batch_loss": (4, 4, 1), "max/loss_average": (4, 4, 2.5)}
    for name, values in expected.items():
        assert np.isnan(history[f"train/{name}"][0])
        assert tuple(history[f"train/{name}"][1:]) == values


@pytest.mark.variants("full")
@pytest.mark.parametrize("kind", [Game, Apart])
@pytest.mark.parametrize("order", ["alternating", "simultaneous"])
def test_batch_loss_and_its_average_of_each_phase_G8(kind: Any, order: Any) -> None:
    history = fit(
        MultiOptimizer(order=order, **sgd(0.5, 0.25)), model=game(kind=kind), steps=3
    ).history
    for phase in ("min", "max"):
        losses = history[f"train/{phase}/loss"]
        assert history[f"train/{phase}/batch_loss"].tolist() == losses.tolist()
        means = np.cumsum(losses) / np.arange(1, 4)
        assert history[f"train/{phase}/loss_average"] == pytest.approx(means, rel=1e-6)


@pytest.mark.full
def test_aux_of_a_step_with_several_optimizers_leaves_it_where_asked() -> None:
    class WithAux(Game):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return super().training_step(batch, ctx).replace(aux={"y": self.y})

    trainer = engine(MultiOptimizer(**sgd(0.5, 0.25)), steps=1)
    state = trainer.init_state(game(kind=WithAux), ONE)
    _, output = trainer.step(state, next(iter(ONE)), returns=("aux",))
    assert float(output.aux["y"]) == 2


# --- what it costs --------------------------------------------------------------------------------


@pytest.mark.full
def test_losses_from_one_forward_pass_take_fewer_operations() -> None:
    """The trunk goes forward once for both losses, and back for the one that updates it. Of a GAN,
    a sixth is saved."""
    heads: dict[str, Any] = {
        "a": Phase(optax.sgd(0.1), fg.select("trunk", "a")),
        "b": Phase(optax.sgd(0.1), "b"),
    }
    gan: dict[str, Any] = {
        name: Phase(optax.sgd(0.1), name) for name in ("discriminator", "generator")
    }
    flops: dict[Any, float] = {}
    kinds: list[tuple[Any, Any]] = [
        (Heads, heads),
        (HeadsApart, heads),
        (Pair, gan),
        (PairApart, gan),
    ]
    for kind, phases in kinds:
        compiled = Compiled()
        engine(MultiOptimizer(order="simultaneous", **phases), compiled, steps=1).fit(
            kind(64, key=jax.random.key(0)), points()
        )
        flops[kind] = compiled.flops
    assert flops[Heads] <= 0.8 * flops[HeadsApart], flops
    assert flops[Pair] <= 0.85 * flops[PairApart], flops


@pytest.mark.full
def test_generator_output_shared_by_both_phases_is_computed_once() -> None:
    """Each phase has random numbers of its own; those in the batch are the same for both."""

    class Given(PairApart):
        def losses(self, batch: Any, ctx: fg.Context) -> dict[str, Any]:
            batch, z = batch
            judge, fake = jax.vmap(self.discriminator), jax.vmap(self.generator)(z)
            return {
                "generator": lambda: fooled(judge(fake)),
                "discriminator": lambda: bce_loss(judge(batch), judge(fake)),
            }

    class Noise:
        @fg.hookimpl
        def transform_batch(self, batch: Any, ctx: fg.Context) -> Any:
            return batch, jax.random.normal(ctx.key(), (len(batch), 4))

    flops: list[float] = []
    for kind, plugins in ((Given, [Noise()]), (PairApart, [])):
        compiled = Compiled()
        phases: dict[str, Any] = {
            name: Phase(optax.sgd(0.1), name) for name in ("discriminator", "generator")
        }
        engine(MultiOptimizer(**phases), compiled, *plugins, steps=1).fit(make(kind, 64), points())
        flops.append(compiled.flops)
    assert flops[0] < 0.95 * flops[1], flops


def make(kind: Any, width: int) -> Any:
    return kind(width, key=jax.random.key(0))


@pytest.mark.full
def test_a_phase_computes_only_what_it_needs() -> None:
    """Of functions of their own, each is computed for its own phase: two phases that take turns
    cost no more."""
    phases: dict[str, Any] = {
        "a": Phase(optax.sgd(0.1), fg.select("trunk", "a")),
        "b": Phase(optax.sgd(0.1), "b"),
    }
    flops: dict[Any, float] = {}
    for names in (("a", "b"), ("a",), ("b",)):
        only = {name: phases[name] for name in names}

        class Some(HeadsApart):
            def losses(self, batch: Any, ctx: fg.Context, names: Any = names) -> dict[str, Any]:
                return {
                    name: loss for name, loss in super().losses(batch, ctx).items() if name in names
                }

        compiled = Compiled()
        engine(MultiOptimizer(**only), compiled, steps=1).fit(make(Some, 64), points())
        flops[names] = compiled.flops
    assert flops["a", "b"] < 1.05 * (flops["a",] + flops["b",]), flops


class Shown(Game):
    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return super().training_step(batch, ctx).replace(media={"x": picture(self.x)})


class ShownApart(Apart):
    def losses(self, batch: Any, ctx: fg.Context) -> dict[str, Any]:
        shown = fg.Output(self.y**2 / 2 - self.x * self.y, media={"y": picture(self.y)})
        return {**super().losses(batch, ctx), "max": lambda: shown}


@pytest.mark.full
@pytest.mark.parametrize("order", ["alternating", "simultaneous"])
def test_media_come_from_a_phase_that_runs_every_step(order: Any) -> None:
    show, x, y, expected = Show(), 1.0, 2.0, []
    for _ in range(3):
        expected.append(x)
        new = x - 0.5 * (x + y)
        y -= 0.25 * (y - (new if order == "alternating" else x))
        x = new
    engine(MultiOptimizer(order=order, **sgd(0.5, 0.25)), show, steps=3).fit(game(kind=Shown), ONE)
    np.testing.assert_allclose(show.numbers("x"), expected)


@pytest.mark.full
def test_idle_phase_still_shows_its_media() -> None:
    """y is 2 until the phase `max` runs with the second update, where x is 0.25: 2 - 0.25 * (2 +
    0.75)."""
    show = Show()
    engine(MultiOptimizer(**sgd(0.5, 0.25, every=2)), show, steps=3).fit(game(kind=ShownApart), ONE)
    x = (1 - 0.5 * 3) - 0.5 * (1 - 0.5 * 3 + 2)
    np.testing.assert_allclose(show.numbers("max/y"), [2, 2, 2 - 0.25 * (2 - x)])
