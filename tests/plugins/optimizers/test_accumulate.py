"""Gradients of several microbatches or steps for one update."""

from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, DataError, ModelError, NonFiniteError
from fulgurite_optimizers import (
    GradientAccumulation,
    GradientClip,
    MultiOptimizer,
    Phase,
    ReduceOnPlateau,
    WeightClip,
)
from fulgurite_testing import assert_same_bits
from games import Compiled, Show, engine, game, picture, played, points


class Distance(fg.Module):
    """The distance of a number from ten, whatever the batch."""

    place: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.abs(10 - self.place))

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


class Linear(fg.Module):
    """Least squares over the examples that are not masked."""

    weight: jax.Array
    optimizer: Any = eqx.field(static=True)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        error = (batch @ self.weight - 1) ** 2
        mean = jnp.mean(error, where=ctx.mask)
        return fg.Output(
            mean, metrics={"error": fg.metrics.Mean.from_values(error, ctx.mask), "bare": mean}
        )

    def configure_optimizers(self) -> Any:
        return self.optimizer


ONE = [np.zeros(1, np.float32)]


@pytest.mark.full
@pytest.mark.parametrize("steps_per_execution", [1, pytest.param(4, marks=pytest.mark.full)])
def test_three_steps_for_one_update(steps_per_execution: int) -> None:
    """p is 0 after one step and after two, 0.1 after three; the gradient is -1. What remains at the
    end is applied."""
    observed: list[float] = []

    class Look:
        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [
                fg.ScheduledAction(
                    "look", 1, lambda run: observed.append(float(run.state.module.place)), "save"
                )
            ]

    start = Distance(jnp.float32(0))
    result = engine(
        GradientAccumulation(3, "steps"), Look(), steps=5, steps_per_execution=steps_per_execution
    ).fit(start, ONE)
    np.testing.assert_allclose(observed, [0, 0, 0.1, 0.1, 0.2], rtol=1e-6)
    assert float(result.module.place) == pytest.approx(0.2)
    assert result.state.opt_state["default"].optimizer.num_accumulated == 0
    assert result.metrics["train"]["default/updates"] == 1, (
        "the last one came after the window was closed"
    )
    whole = engine(GradientAccumulation(3, "steps"), steps=6).fit(start, ONE)
    assert float(whole.module.place) == pytest.approx(0.2)


def test_remainder_is_applied_when_a_plugin_stops_training() -> None:
    class Stopping:
        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [
                fg.ScheduledAction(
                    "stop", fg.At(4), lambda run: fg.StopTraining("enough"), "decide"
                )
            ]

    result = engine(GradientAccumulation(3, "steps"), Stopping(), steps=9).fit(
        Distance(jnp.float32(0)), ONE
    )
    assert (result.stop_reason, float(result.module.place)) == ("enough", pytest.approx(0.2))


class Steep(Distance):
    """Its gradients are finite, and the update by that of step 5 is not."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        ahead = self.place - jax.lax.stop_gradient(self.place)
        return fg.Output(ahead * jnp.where(ctx.step == 4, 1e10, 1e-30))

    def configure_optimizers(self) -> Any:
        return optax.sgd(1e30)


@pytest.mark.full
def test_nonfinite_remainder_is_not_applied() -> None:
    saved: list[int] = []
    plugin = type(
        "Save", (), {"save_checkpoint": fg.hookimpl(lambda self, run: saved.append(run.step))}
    )()
    with pytest.raises(
        NonFiniteError, match="step 5: the update of place, of the gradients that were left,"
    ):
        engine(GradientAccumulation(4, "steps"), plugin, steps=5).fit(Steep(jnp.float32(0)), ONE)
    assert not saved
    for policy, expected in (("skip", -1), ("ignore", -np.inf)):
        result = engine(GradientAccumulation(4, "steps"), steps=5, on_nonfinite=policy).fit(
            Steep(jnp.float32(0)), ONE
        )
        np.testing.assert_allclose(result.module.place, expected)


@pytest.mark.full
def test_remainder_is_an_ordinary_update() -> None:
    """It obeys constraints, a plateau has made it smaller, and evaluations of whatever kind come
    after it."""

    observed: list[float] = []

    class Evaluating:
        plugin_name = "probe"

        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [fg.ScheduledAction("evaluate", 1, self.evaluate, "evaluate")]

        def evaluate(self, run: fg.Run) -> None:
            run.report_evaluation("test", {"same": 1.0})
            observed.append(float(run.state.module.place))

    plateau = ReduceOnPlateau("test/same", fg.At(1, 3), mode="min", factor=0.5, patience=1)
    start = Distance(jnp.float32(0))
    result = engine(Evaluating(), GradientAccumulation(3, "steps"), plateau, steps=5).fit(
        start, ONE
    )
    assert float(result.module.place) == pytest.approx(0.1 + 0.05)
    assert observed == pytest.approx([0, 0, 0.1, 0.1, 0.15])
    held = engine(
        GradientAccumulation(3, "steps"), WeightClip("place", max_value=0.15), steps=5
    ).fit(start, ONE)
    assert float(held.module.place) == pytest.approx(0.15)


@pytest.mark.full
def test_steps_take_the_mean_gradient_through_clipping_and_optimizer() -> None:
    """Five batches of 4, by twos: the same as Adam on clipped means by hand, with the last one
    alone."""
    data = points(20, 4)
    start = Linear(jnp.ones(8), optax.adam(0.1))
    result = engine(GradientAccumulation(2, "steps"), GradientClip(max_norm=0.5), steps=5).fit(
        start, data
    )
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    batches = list(engine(steps=5).iter_batches(data))
    weight: Any = start.weight
    state = optimizer.init(weight)
    for group in (batches[:2], batches[2:4], batches[4:]):
        grads = [jax.grad(lambda w, b=batch: jnp.mean((b @ w - 1) ** 2))(weight) for batch in group]
        updates, state = optimizer.update(sum(grads) / len(grads), state, weight)
        weight = weight + updates
    np.testing.assert_allclose(result.module.weight, weight, rtol=1e-5)


@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_microbatches_have_the_gradient_of_the_whole_batch(remainder: Any) -> None:
    """With padding too, where one microbatch has fewer examples than the others, or none."""
    x = np.random.default_rng(0).normal(size=(21, 8)).astype(np.float32)
    data = fg.ArrayData(x, 8, remainder=remainder)
    start = Linear(jnp.ones(8), optax.adam(0.1))
    whole = engine(steps=6).fit(start, data)
    split = engine(GradientAccumulation(4), steps=6).fit(start, data)
    np.testing.assert_allclose(split.module.weight, whole.module.weight, rtol=1e-5)
    for name in ("loss", "error", "bare"):
        np.testing.assert_allclose(
            split.metrics["train"][name], whole.metrics["train"][name], rtol=1e-5
        )


class Centred(fg.Module):
    """Keeps the mean of the last examples that it saw."""

    weight: jax.Array
    mean: eqx.nn.StateIndex

    def __init__(self, *, key: Any) -> None:
        self.weight, self.mean = jnp.float32(0), eqx.nn.StateIndex(jnp.float32(0))

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        assert ctx.model_state is not None
        state = ctx.model_state.set(self.mean, jnp.mean(batch, where=ctx.mask))
        return fg.Output(self.weight**2, model_state=state)

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


@pytest.mark.full
def test_microbatch_of_padding_leaves_the_model_state_alone() -> None:
    """The second batch is 5 and padding: its second microbatch has no example, and the mean of
    nothing is NaN."""
    data = fg.ArrayData(np.asarray([1, 2, 3, 4, 5], np.float32), 4, remainder="pad")
    result = engine(GradientAccumulation(2), steps=2).fit(eqx.nn.make_with_state(Centred), data)
    assert result.model_state is not None
    assert float(result.model_state.get(result.module.mean)) == 5


@pytest.mark.full
def test_running_metrics_equal_those_of_whole_batches() -> None:
    """Of 0, 1, ... 5, each with a mean over the batch, however it is divided; what begins as a
    plain mean does."""

    class Followed(Linear):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            mean = jnp.mean(batch, where=None if ctx.mask is None else ctx.mask[:, None])
            metrics = {
                "average": fg.metrics.ExponentialMovingAverage.from_values(mean, decay=0.6),
                "last": fg.metrics.LastValue.from_values(mean),
            }
            return super().training_step(batch, ctx).replace(metrics=metrics)

    values = np.repeat(np.arange(6, dtype=np.float32), 4)[:22] + np.tile(
        np.asarray([-1, 1], np.float32), 11
    )
    data = fg.ArrayData(np.repeat(values[:, None], 8, 1), 4, remainder="pad")
    start = Followed(jnp.zeros(8), optax.sgd(0.0))
    expected = [0, 0.5, 1.1, 1.86, 2.716, 3.6296]  # 0.4 of the new value from the third step on
    for plugins in ((), (GradientAccumulation(4),), (GradientAccumulation(2, "steps"),)):
        result = engine(*plugins, steps=6, log_every=1).fit(start, data)
        np.testing.assert_allclose(result.history["train/average"], expected, rtol=1e-6)
        np.testing.assert_allclose(result.history["train/last"], np.arange(6), rtol=1e-6)
    with pytest.raises(ModelError, match="metric 'all' is a CollectingMetric, which keeps"):
        engine(GradientAccumulation(2), steps=1).init_state(
            Gathering(jnp.zeros(8), optax.sgd(0.0)), points()
        )


class Gathering(Linear):
    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.sum(self.weight), metrics={"all": Every(jnp.ones(len(batch), bool))})


class Every(fg.metrics.CollectingMetric):
    def compute(self) -> Any:
        return self.mask.sum()


def test_method_called_losses_belongs_to_the_module() -> None:
    class Helped(Distance):
        def losses(self, place: jax.Array) -> jax.Array:
            return jnp.abs(10 - place)

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(self.losses(self.place))

    assert float(
        engine(GradientAccumulation(1), steps=2).fit(Helped(jnp.float32(0)), ONE).module.place
    ) == pytest.approx(0.2)


@pytest.mark.full
def test_half_precision_gradients_are_summed_in_single() -> None:
    """A gradient of 200 for each of 512 examples is 102,400 in all, which half precision does not
    reach."""

    class Half(Distance):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(
                (200 * self.place * jnp.mean(batch, dtype=self.place.dtype)).astype(jnp.float32)
            )

    batch = [np.ones(512, np.float32)]
    result = engine(GradientAccumulation(2), steps=1).fit(Half(jnp.float16(0)), batch)
    assert float(result.module.place) == -20
    steps = engine(GradientAccumulation(1, "steps"), steps=1).fit(
        Half(jnp.float16(0)), [np.full(512, 4, np.float32)]
    )
    assert steps.metrics["train"]["default/gradient_norm"] == 800


@pytest.mark.full
def test_accumulated_gradients_are_applied_by_a_shorter_continued_fit() -> None:
    first, later = (
        engine(GradientAccumulation(4, "steps")),
        engine(GradientAccumulation(2, "steps")),
    )
    state = first.init_state(Distance(jnp.float32(0)), ONE)
    for _ in range(3):
        state, _ = first.step(state, ONE[0])
    state, _ = later.step(state, ONE[0])
    assert float(state.module.place) == pytest.approx(0.1)


def test_a_batch_must_be_a_multiple() -> None:
    with pytest.raises(DataError, match=r"shape \[8, 8\] cannot be split into 3 parts"):
        engine(GradientAccumulation(3), steps=1).init_state(
            Linear(jnp.ones(8), optax.sgd(0.1)), points(16, 8)
        )
    bad: Any = "batches"
    for make in (lambda: GradientAccumulation(0), lambda: GradientAccumulation(2, bad)):
        with pytest.raises(ConfigurationError, match="GradientAccumulation: "):
            make()


class Heated(fg.Module):
    """A weight whose gradient is the mean of `x` times the single number of the batch."""

    weight: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean(batch["x"]) * batch["temperature"] * self.weight)

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


@pytest.mark.full
@pytest.mark.parametrize(
    "plugin",
    [
        GradientAccumulation(2),
        MultiOptimizer(default=Phase(optax.sgd(0.05), repeat=2, split=True)),
    ],
    ids=["microbatches", "shares"],
)
def test_each_part_of_a_batch_has_its_single_numbers(plugin: Any) -> None:
    batch = {"x": np.arange(4, dtype=np.float32), "temperature": np.float32(2)}
    module = engine(plugin, steps=1).fit(Heated(jnp.ones(())), [batch]).module
    assert float(module.weight) == pytest.approx(1 - 0.1 * 1.5 * 2)


def test_a_batch_of_single_numbers_has_no_parts() -> None:
    batch = {"x": np.float32(1), "temperature": np.float32(2)}
    with pytest.raises(DataError, match="into 2 parts, because it has no axis of examples"):
        engine(GradientAccumulation(2, assume_mean=True), steps=1).init_state(
            Heated(jnp.ones(())), [batch]
        )


class Deep(fg.Module):
    """A perceptron with large activations."""

    net: eqx.nn.MLP

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output((jax.vmap(self.net)(batch) ** 2).mean())

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


@pytest.mark.full
def test_microbatches_take_a_fraction_of_the_memory() -> None:
    memory = {}
    for plugins in ((), (GradientAccumulation(8),)):
        compiled = Compiled()
        model = Deep(eqx.nn.MLP(8, 8, 32, 6, key=jax.random.key(0)))
        engine(*plugins, compiled, steps=1).fit(model, points(4096, 4096))
        memory[len(plugins)] = compiled.executables[-1].memory_analysis().temp_size_in_bytes
    assert memory[1] < 0.35 * memory[0], memory


@pytest.mark.full
def test_microbatches_draw_distinct_numbers_and_carry_the_model_state() -> None:
    class Counted(fg.Module):
        weight: jax.Array
        index: eqx.nn.StateIndex

        def __init__(self, *, key: Any) -> None:
            self.weight, self.index = jnp.zeros(()), eqx.nn.StateIndex(jnp.zeros((), jnp.int32))

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            assert ctx.model_state is not None
            state = ctx.model_state.set(self.index, ctx.model_state.get(self.index) + 1)
            drawn = jax.random.uniform(ctx.key())
            spread = {
                "least": fg.metrics.Min.from_values(drawn),
                "most": fg.metrics.Max.from_values(drawn),
            }
            return fg.Output(self.weight, metrics=spread, model_state=state)

        def configure_optimizers(self) -> Any:
            return optax.sgd(0.1)

    result = engine(GradientAccumulation(4), steps=2, log_every=1).fit(
        eqx.nn.make_with_state(Counted), points(16, 16)
    )
    assert result.model_state is not None and int(result.model_state.get(result.module.index)) == 8
    metrics = result.metrics["train"]
    assert metrics["least"] < metrics["most"]


@pytest.mark.full
def test_phases_accumulate_separately() -> None:
    """x by every second gradient, their mean; y by each: x stays 1 while y is 2 - (2 - 1)/4 = 1.75.

    Then x: 1 - ((1 + 2) + (1 + 1.75))/2/2 = -0.4375, y: 1.75 - (1.75 + 0.4375)/4.
    """
    phases = MultiOptimizer(
        min=Phase(optax.sgd(0.5), "x", accumulate=GradientAccumulation(2, "steps")),
        max=Phase(optax.sgd(0.25), "y"),
    )
    result = engine(phases, steps=2, log_every=1).fit(game(), ONE)
    assert played(result) == (-0.4375, 1.203125)
    assert result.history["train/min/updates"].tolist() == [0, 1]


@pytest.mark.full
def test_one_microbatch_is_the_plain_step() -> None:
    start = Linear(jnp.ones(8), optax.adam(0.1))
    plain, single = (
        engine(*plugins, steps=5).fit(start, points())
        for plugins in ((), (GradientAccumulation(1, "steps"),))
    )
    np.testing.assert_allclose(single.module.weight, plain.module.weight, rtol=1e-6)
    assert_same_bits(single.state.key, plain.state.key)


@pytest.mark.full
@pytest.mark.parametrize("how, expected", [("microbatch", 2.0), ("steps", 3.0)])
def test_media_come_from_the_first_microbatch_or_the_step(how: Any, expected: float) -> None:
    class Shown(Linear):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return super().training_step(batch, ctx).replace(media={"mean": picture(batch.mean())})

    show, batch = (
        Show(),
        np.array([[1], [2], [3], [6]], np.float32),
    )  # the examples 1 and 3 are a microbatch
    engine(GradientAccumulation(2, how), show, steps=2).fit(
        Shown(jnp.ones(1), optax.sgd(0.0)), [batch]
    )
    assert show.numbers("mean") == [expected] * 2


def test_numbers_at_steps_are_checked() -> None:
    settings = GradientAccumulation({4: 2, 0: 1, 6: 2, 8: 4})
    assert settings.changes == {4: 2, 8: 4}
    numbers = [settings.for_step(step).n for step in range(10)]
    assert numbers == [1, 1, 1, 1, 2, 2, 2, 2, 4, 4]
    for n in ({1: 2}, {0: 1, 2.5: 2}, {0: 1, -1: 2}):
        with pytest.raises(ConfigurationError, match="a mapping begins with step 0"):
            GradientAccumulation(n)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigurationError, match="n is 0; it must be a positive integer"):
        GradientAccumulation({0: 1, 5: 0})


@pytest.mark.full
@pytest.mark.parametrize("steps_per_execution", [1, pytest.param(4, marks=pytest.mark.full)])
def test_accumulation_over_more_steps_from_a_step_on(steps_per_execution: int) -> None:
    """The gradient is -1: updates at steps 1, 2, 3; then at 6, 9, and for the rest at 10."""
    compiled = Compiled()
    plugin = GradientAccumulation({0: 1, 3: 3}, "steps")
    result = engine(
        plugin, compiled, steps=10, log_every=1, steps_per_execution=steps_per_execution
    ).fit(Distance(jnp.float32(0)), ONE)
    updates = result.history["train/default/updates"].tolist()
    assert updates == [1, 2, 3, 3, 3, 4, 4, 4, 5, 5]
    assert float(result.module.place) == pytest.approx(0.6)
    (message,) = result.messages
    assert message == (
        "gradients are accumulated over 3 steps from step 3 on: the step is compiled again"
    )
    assert len(compiled.executables) == 2


@pytest.mark.full
def test_what_waits_is_part_of_the_next_mean() -> None:
    """Two of four gradients wait when the number becomes 1: the next update is by three."""
    plugin = GradientAccumulation({0: 4, 2: 1}, "steps")
    result = engine(plugin, steps=4, log_every=1).fit(Distance(jnp.float32(0)), ONE)
    assert result.history["train/default/updates"].tolist() == [0, 0, 1, 2]
    assert float(result.module.place) == pytest.approx(0.2)


@pytest.mark.full
def test_more_microbatches_from_a_step_on() -> None:
    """The same gradients; a number that does not divide the batch is found at the beginning."""
    start = Linear(jnp.ones(8), optax.adam(0.1))
    compiled = Compiled()
    whole = engine(steps=4).fit(start, points())
    split = engine(GradientAccumulation({0: 1, 2: 4}), compiled, steps=4).fit(start, points())
    np.testing.assert_allclose(split.module.weight, whole.module.weight, rtol=1e-5)
    assert len(compiled.executables) == 2
    with pytest.raises(DataError, match="cannot be split into 3 parts"):
        engine(GradientAccumulation({0: 1, 100: 3}), steps=200).init_state(start, points())


@pytest.mark.full
def test_phases_change_where_the_plugin_knows_the_steps() -> None:
    """x by each gradient and then by every second one, y by each.

    x: 1 - 1.5 = -0.5, y: 2 - (2 + 0.5)/4 = 1.375; x waits; y: 1.375 - (1.375 + 0.5)/4 = 0.90625;
    x: -0.5 - ((-0.5 + 1.375) + (-0.5 + 0.90625))/2/2, y follows it.
    """
    accumulate = GradientAccumulation({0: 1, 1: 2}, "steps")
    phases: dict[str, Any] = {
        "min": Phase(optax.sgd(0.5), "x", accumulate=accumulate),
        "max": Phase(optax.sgd(0.25), "y"),
    }
    result = engine(MultiOptimizer(**phases), steps=3).fit(game(), ONE)
    x = -0.5 - (0.875 + 0.40625) / 4
    assert played(result) == (x, 0.90625 - (0.90625 - x) / 4)
    hidden = type("Hidden", (type(game()),), {"configure_optimizers": lambda self: phases})
    with pytest.raises(ConfigurationError, match="give the phases to MultiOptimizer itself"):
        engine(MultiOptimizer(), steps=3).init_state(hidden(jnp.float32(1), jnp.float32(2)), ONE)


@pytest.mark.full
@pytest.mark.parametrize("n", [2, 4])
def test_a_penalty_on_the_weights_goes_with_the_tokens_of_several_steps(n: int) -> None:
    """It does not depend on the batch, so that any weight is right; two steps have no token."""
    values = np.array([[1, 2, 3], [4, 0, 0], [0, 0, 0], [0, 0, 0]], np.float32)

    class Penalized(fg.Module):
        weight: jax.Array

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            errors = (self.weight - batch) ** 2
            penalty = 0.1 * self.weight**2
            return fg.Output(
                fg.metrics.Mean.from_values(errors, batch > 0), losses={"penalty": penalty}
            )

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(0.1)

    plugin = GradientAccumulation(n, "steps")
    engine = fg.Engine(steps=n, log_every=n, autoload=False, plugins=[plugin])
    result = engine.fit(Penalized(jnp.float32(0.5)), list(values[:n, None]))
    tokens = values[values > 0]
    gradient = np.mean(2 * (0.5 - tokens)) + 0.2 * 0.5
    assert float(result.module.weight) == pytest.approx(0.5 - 0.1 * gradient, rel=1e-6)
    loss = np.mean((0.5 - tokens) ** 2) + 0.1 * 0.25
    assert result.history["train/loss"] == pytest.approx([loss], rel=1e-6)
