"""Parts of the module that are not trained, for good or for a while."""

from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, ModelError, PathError
from fulgurite_optimizers import (
    Freeze,
    GradientAccumulation,
    MultiOptimizer,
    Phase,
    freeze,
    optimize_only,
)
from fulgurite_testing import assert_same_bits
from games import ONE, Compiled, engine, game, played, points, sgd


class Two(fg.Module):
    """Two layers and a loss that decays both, unless their optimizer leaves one alone."""

    first: jax.Array
    second: jax.Array

    def __init__(self, *, key: Any = None) -> None:
        self.first, self.second = jnp.full((8, 4), 0.3), jnp.full((4,), 0.5)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(((jnp.tanh(batch @ self.first) @ self.second - 1) ** 2).mean())

    def configure_optimizers(self) -> Any:
        return optax.adamw(1e-2, weight_decay=0.1)


class Partial(Two):
    def configure_optimizers(self) -> Any:
        return optimize_only(optax.adamw(1e-2, weight_decay=0.1), "second")


def test_permanently_frozen_parameters_take_no_part_in_training() -> None:
    """No change, no decay, no gradient, no optimizer memory; the same bits as an optimizer for the
    rest alone."""
    compiled = {name: Compiled() for name in ("whole", "frozen")}
    whole = engine(compiled["whole"], steps=5).fit(Two, points())
    result = engine(freeze("first"), compiled["frozen"], steps=5).fit(Two, points())
    by_phase = engine(steps=5).fit(Partial, points())
    assert_same_bits(result.module.first, Two().first)
    assert float(abs(result.module.second - Two().second).max()) > 0.01
    assert_same_bits(result.module.second, by_phase.module.second)
    shapes = [leaf.shape for leaf in jax.tree.leaves(result.state.opt_state)]
    assert shapes == [(), (4,), (4,)]
    assert len(jax.tree.leaves(whole.state.opt_state)) == 5
    assert compiled["frozen"].flops < 0.8 * compiled["whole"].flops


@pytest.mark.variants("full")
@pytest.mark.parametrize("steps_per_execution", [1, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "until", [pytest.param(3, marks=pytest.mark.full), fg.At(3), fg.Every(3), fg.EveryEpoch(1)]
)
def test_frozen_until_a_step(until: Any, steps_per_execution: int) -> None:
    """Three steps of the rest alone, then steps of both; the optimizer's state for the rest continues
    as it was."""
    observed: dict[int, Any] = {}
    compiled = Compiled()

    class Look:
        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [
                fg.ScheduledAction(
                    "look",
                    1,
                    lambda run: observed.update({run.step: jax.tree.map(jnp.copy, run.state)}),
                )
            ]

    plugins = [Freeze("first", until=until), compiled, Look()]
    data = points(48)
    result = engine(*plugins, steps=6, steps_per_execution=steps_per_execution).fit(Two, data)
    for step in (1, 2, 3):
        assert_same_bits(observed[step].module.first, Two().first)
        assert not any(
            leaf.any()
            for leaf in (
                observed[step].opt_state[1][0].mu.first,
                observed[step].opt_state[1][0].nu.first,
            )
        )
    assert float(abs(observed[4].module.first - Two().first).max()) > 0
    assert len(compiled.executables) == 2
    (message,) = result.messages
    assert "select('first') is trained from step 3 on" in message.replace('"', "'")

    rest, both = engine(freeze("first"), steps=3).fit(Two, data), observed[3]
    assert_same_bits(observed[3].module.second, rest.module.second)
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    params: Any = (both.module.first, both.module.second)
    adam = both.opt_state[1][0]
    halves = {
        name: (getattr(adam, name).first, getattr(adam, name).second) for name in ("mu", "nu")
    }
    state: Any = (adam._replace(**halves), *both.opt_state[1][1:])
    for batch in [*engine(epochs=2).iter_batches(data)][3:6]:
        grads = jax.grad(lambda p, b=batch: ((jnp.tanh(b @ p[0]) @ p[1] - 1) ** 2).mean())(params)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(result.module.first, params[0], rtol=1e-5)
    np.testing.assert_allclose(result.module.second, params[1], rtol=1e-5)


@pytest.mark.full
def test_a_part_is_frozen_since_a_step_and_between_two() -> None:
    def is_frozen(**times: Any) -> str:
        plugin = Freeze("first", **times)
        step_range = fg.StepRange(0, 5)
        return "".join("x" if plugin.is_frozen(step, step_range) else "." for step in range(5))

    assert is_frozen(since=2) == "..xxx"
    assert is_frozen(since=2, until=4) == "..xx."
    assert is_frozen(since=4, until=2) == "xx..x"
    assert is_frozen(until=2) == "xx..."
    whole = engine(steps=2).fit(Two, points())
    result = engine(Freeze("first", since=2), steps=5).fit(Two, points())
    assert_same_bits(result.module.first, whole.module.first)
    assert float(abs(result.module.second - whole.module.second).max()) > 0.005
    (message,) = result.messages
    assert message.endswith("is frozen from step 2 on: the step is compiled again")


@pytest.mark.full
def test_continued_fit_is_not_frozen_again() -> None:
    frozen_first = engine(Freeze("first", until=3), steps=4)
    result = frozen_first.fit(Two, points())
    before = np.asarray(result.module.first)
    again = frozen_first.fit(data=points(), state=result.state, steps=2)
    assert (np.asarray(again.module.first) != before).any()
    state = frozen_first.init_state(Two, points())
    for batch in [*engine(steps=4).iter_batches(points())]:
        state, _ = frozen_first.step(state, batch)
    np.testing.assert_allclose(np.asarray(state.module.first), before, rtol=1e-6)


@pytest.mark.full
def test_phases_may_be_frozen_too() -> None:
    """While x is frozen y alone moves: 2 - (2 - 1)/4 = 1.75; then as ever."""
    three = type("Three", (type(game()),), {"__annotations__": {"z": jax.Array}})
    phases: dict[str, Any] = {
        "min": Phase(optax.sgd(0.5), fg.select("x", "z")),
        "max": Phase(optax.sgd(0.25), "y"),
    }
    start = three(jnp.float32(1), jnp.float32(2), jnp.float32(3))

    trained: list[tuple[bool, ...]] = []

    class Pull:
        @fg.hookimpl
        def loss_terms(self, module: Any) -> dict[str, Any]:
            return {"min/z": module.z**2}

        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [fg.ScheduledAction("look", fg.AtStart() | fg.At(1), self.look)]

        def look(self, run: fg.Run) -> None:
            chosen = run.update_rule.for_step(run.step, run.step_range).trainable_mask(
                run.state.module
            )
            trained.append((chosen.x, chosen.y, chosen.z))

    result = engine(
        MultiOptimizer(**phases), Pull(), Freeze("x", until=1), steps=2, log_every=1
    ).fit(start, ONE)
    assert played(result) == (1 - 2.75 / 2, 1.75 - (1.75 + 0.375) / 4)
    assert float(result.module.z) == 0
    assert trained == [(False, True, True), (True, True, True)]
    whole = engine(MultiOptimizer(**sgd(0.5, 0.25)), freeze("x"), steps=1).fit(game(), ONE)
    assert played(whole) == (1, 1.75)


def test_invalid_freezing_is_an_error() -> None:
    with pytest.raises(PathError, match="'third' selects no array"):
        engine(freeze("third"), steps=1).init_state(Two, points())
    for until in (fg.EveryEpoch(), fg.EvenlySpaced(2) | fg.At(9), fg.AtEnd()):
        loop = engine(Freeze("first", until=until))
        with pytest.raises(
            ConfigurationError, match="a loop of engine.step knows of no epochs and no end"
        ):
            loop.step(loop.init_state(Two, points()), next(iter(points())))
    with pytest.raises(ConfigurationError, match="until is EverySeconds"):
        Freeze("first", until=fg.EverySeconds(3))
    with pytest.raises(ConfigurationError, match="until is AtStart"):
        Freeze("first", until=fg.AtStart())


class Halved(fg.Engine):
    """Gives the rule gradients of its own, for the whole module."""

    def train_step(
        self, state: fg.TrainState, batch: Any, ctx: fg.Context, update_rule: fg.UpdateRule
    ) -> tuple[fg.TrainState, fg.Output]:
        grads, output = fg.compute_gradients(self.forward, state.module, batch, ctx)
        return update_rule.apply_gradients(
            state, jax.tree.map(lambda grad: grad / 2, grads), output
        )


class Sum(fg.Module):
    """Both numbers have the gradient 1."""

    a: jax.Array
    b: jax.Array
    optimizer: Any = eqx.field(static=True)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.a + self.b)

    def configure_optimizers(self) -> Any:
        return self.optimizer


@pytest.mark.full
def test_custom_train_step_respects_frozen_parameters() -> None:
    sgd = optax.sgd(1.0, momentum=0.5)
    cases: list[tuple[Any, list[Any], tuple[float, float]]] = [
        (sgd, [], (-1.25, -1.25)),
        (sgd, [Freeze("b")], (-1.25, 0)),
        (sgd, [Freeze("b", until=1)], (-1.25, -0.5)),
        (optimize_only(sgd, "a"), [], (-1.25, 0)),
    ]
    for optimizer, plugins, expected in cases:
        result = Halved(steps=2, plugins=plugins, autoload=False).fit(
            Sum(jnp.zeros(()), jnp.zeros(()), optimizer), ONE
        )
        assert (float(result.module.a), float(result.module.b)) == expected
    with pytest.raises(
        ModelError, match=r"PhasedUpdate takes its own gradients: call update_rule\(self.forward"
    ):
        Halved(plugins=[GradientAccumulation(1)], autoload=False).init_state(
            Sum(jnp.zeros(()), jnp.zeros(()), sgd), ONE
        )


def test_part_of_a_packed_array_cannot_be_frozen() -> None:
    flat = optax.flatten(optax.adam(0.1))
    with pytest.raises(
        ConfigurationError, match="is one array for all parameters, as optax.flatten"
    ):
        engine(Freeze("b", until=1), steps=1).init_state(
            Sum(jnp.zeros(()), jnp.zeros(()), flat), ONE
        )


class Normed(fg.Module):
    """Two layers with batch statistics; the second one has no parameters of its own."""

    backbone: eqx.nn.BatchNorm
    head: eqx.nn.Sequential

    def __init__(self, *, key: Any) -> None:
        self.backbone = eqx.nn.BatchNorm(4, axis_name="batch", mode="batch")
        plain = eqx.nn.BatchNorm(1, "batch", mode="batch", channelwise_affine=False)
        self.head = eqx.nn.Sequential([eqx.nn.Linear(4, 1, key=key), plain])

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        def apply(x: Any, state: Any) -> Any:
            x, state = self.backbone(x, state)
            return self.head(x, state)

        run = jax.vmap(apply, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        preds, state = run(batch["x"], ctx.model_state)
        return fg.Output(((preds - 1) ** 2).mean(), model_state=state)

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


@pytest.mark.variants("full")
@pytest.mark.parametrize(
    ("plugin", "changes"),
    [
        (Freeze("backbone"), (False, True)),
        (Freeze("head"), (True, False)),
        (Freeze("head.layers[0].bias"), (True, True)),
        (Freeze("backbone", train_statistics=True), (True, True)),
        (Freeze("backbone", until=2), (True, True)),
    ],
)
def test_statistics_of_a_frozen_part_stay(plugin: Freeze, changes: tuple[bool, bool]) -> None:
    x = np.random.default_rng(0).normal(3, 2, size=(8, 4)).astype(np.float32)
    model, initial = eqx.nn.make_with_state(Normed)(key=jax.random.key(0))
    result = engine(plugin, steps=4).fit((model, initial), [{"x": x}])
    assert result.model_state is not None
    norms: list[Any] = [model.backbone, model.head.layers[1]]
    for norm, is_changed in zip(norms, changes, strict=True):
        for index in (norm.batch_state_index, norm.batch_counter):
            before, after = initial.get(index), result.model_state.get(index)
            is_same = all(map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(after)))
            assert is_same != is_changed
    if plugin.until is not None:
        assert int(result.model_state.get(norms[0].batch_counter)) == 2


@pytest.mark.full
def test_training_that_begins_or_ends_within_an_accumulation_is_told() -> None:
    """The encoder's first gradient was (g3 + g4) / 4, half as large, without a word."""
    accumulation = GradientAccumulation(4, "steps")

    class Plain(Two):
        def configure_optimizers(self) -> Any:
            return optax.sgd(0.1)

    def fit(**times: Any) -> fg.FitResult:
        return engine(Freeze("first", **times), accumulation, steps=8).fit(Plain, points())

    within = fit(until=6)
    (message,) = within.messages
    assert "2 steps of the accumulation in progress have no gradient of it" in message
    (aligned,) = fit(until=4).messages
    assert aligned.endswith("the step is compiled again")
    (message,) = fit(since=6).messages
    assert "Its gradients of 2 steps of the accumulation in progress are not applied" in message
    # What the message says, by hand: only `second` has changed in the first update.
    first, second = Two().first, Two().second
    batches = [*engine(steps=8).iter_batches(points())]

    def loss(params: Any, batch: Any) -> jax.Array:
        return ((jnp.tanh(batch @ params[0]) @ params[1] - 1) ** 2).mean()

    grads = [jax.grad(loss)((first, second), batch)[1] for batch in batches[:4]]
    second = second - 0.1 * sum(grads) / 4
    grads = [jax.grad(loss)((first, second), batch)[0] for batch in batches[6:]]
    np.testing.assert_allclose(within.module.first, first - 0.1 * sum(grads) / 4, rtol=1e-5)
