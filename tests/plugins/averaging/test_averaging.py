"""Averages of weights: their values, what they leave as it is, and their statistics."""

from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, FulguriteError, ModelError
from fulgurite_averaging import EMA, Average, Lookahead, Mean, recompute_statistics
from fulgurite_checkpoint import Checkpointer
from fulgurite_evaluators import Evaluator
from fulgurite_optimizers import Freeze, GradientAccumulation, NonNegative
from fulgurite_precision import Precision
from fulgurite_testing import InMemoryCheckpointer

BATCHES = [{"x": np.ones((2, 1), np.float32)}] * 8


class Scalar(fg.Module):
    """A weight whose gradient is 1, or the weight itself, and an integer that stays."""

    weight: jax.Array
    number: jax.Array
    rate: float = eqx.field(static=True, default=-1.0)
    is_square: bool = eqx.field(static=True, default=False)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        loss = self.weight**2 / 2 if self.is_square else self.weight
        return fg.Output(loss * jnp.mean(batch["x"]))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(self.rate)


def fit(*plugins: Any, model: Any = None, steps: int = 8, **settings: Any) -> fg.FitResult:
    engine = fg.Engine(steps=steps, log_every=1, autoload=False, plugins=plugins, **settings)
    return engine.fit(model or Scalar(jnp.zeros(()), jnp.int32(7)), BATCHES)


def list_averages(rule: Any, num_steps: int) -> list[float]:
    """Return the average after each step of weights 1, 2, 3, … that began at 0; eagerly."""
    average = Average(rule)
    streams: Any = None
    module = Scalar(jnp.zeros(()), jnp.int32(7))
    state = average.init_plugin_state(module, None)
    values = []
    for step in range(num_steps):
        module = Scalar(jnp.float32(step + 1), jnp.int32(7))
        ctx = fg.Context(streams, jnp.int32(step), training=True)
        _, state = average.after_update(module, state, fg.Output(), ctx)
        values.append(float(state.module.weight))
    return values


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        (EMA(0.5), [0.5, 1.25, 2.125]),
        (EMA(0.5, every=2), [0, 1, 1, 2.5, 2.5, 4.25]),
        (EMA(0.5, debiased=True), [1, 1.666667, 2.428571]),
        (EMA(0.999, warmup=True), [0.9, 1.8, 2.7]),
        (Mean(after=2), [1, 2, 3, 3.5, 4]),
        (Mean(every=2), [0, 2, 2, 3, 3, 4]),
        (Mean(after=1, every=2), [1, 1, 3, 3, 4]),
    ],
    ids=["ema", "ema-every", "debiased", "warmup", "mean", "mean-every", "mean-after"],
)
def test_values_of_averages_by_hand(rule: Any, values: list[float]) -> None:
    np.testing.assert_allclose(list_averages(rule, len(values)), values, atol=1e-6)


def test_half_lives_of_averages() -> None:
    assert EMA(half_life=10).decay_per_update == pytest.approx(0.933033, abs=1e-6)
    assert EMA(half_life=1000).decay_per_update == pytest.approx(0.999307, abs=1e-6)
    assert EMA(half_life=10, every=10).decay_per_update == 0.5


@pytest.mark.parametrize("half_life", [1e3, 1e6, 1e8])
def test_weights_count_their_part_of_a_long_half_life(half_life: float) -> None:
    """Just below 1, float32 has one number in 6e-8: a decay of 1 would stop the average."""
    weight = EMA(half_life=half_life).compute_weight(jnp.int32(0))
    np.testing.assert_allclose(weight, -np.expm1(np.log(0.5) / half_life), rtol=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.05, 0.4, 0.999])
def test_initial_weights_count_nothing_in_a_debiased_average_with_warmup(decay: float) -> None:
    average, product, expected = 0.0, 1.0, []
    for count in range(12):
        rate = min(decay, (1 + count) / (10 + count))
        average = rate * average + (1 - rate) * (count + 1)
        product *= rate
        expected.append(average / (1 - product))
    values = list_averages(EMA(decay, warmup=True, debiased=True), 12)
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    assert values[0] == 1


@pytest.mark.parametrize("plugin", [Average(EMA(0.5)), Average(Mean(every=2)), Lookahead(2)])
def test_a_weight_that_is_infinite_from_the_beginning_stays_so(plugin: Any) -> None:
    """Such as a mask, which the check for finite numbers leaves out too."""
    mask = jnp.array([0, -jnp.inf])
    state: Any = None
    module = Scalar(mask, jnp.int32(7))
    if isinstance(plugin, Average):
        state = plugin.init_plugin_state(module, None)
    else:
        state = plugin.init_plugin_state(module)
    streams: Any = None
    for step in range(4):
        arguments: dict[str, Any] = {}
        if isinstance(plugin, Average):
            arguments["ctx"] = fg.Context(streams, jnp.int32(step), training=True)
        module, state = plugin.after_update(module, state, fg.Output(), **arguments)
        averages = state.module if isinstance(plugin, Average) else state.slow
        np.testing.assert_array_equal(module.weight, mask)
        np.testing.assert_array_equal(averages.weight, mask)


@pytest.mark.full
def test_stochastic_weight_averaging_by_hand() -> None:
    model = Scalar(jnp.ones(()), jnp.int32(7), rate=0.1, is_square=True)
    result = fit(
        Average(Mean(after=3), name="swa"),
        Average(Mean(every=2), name="even"),
        Average(Mean(after=0.375), name="part"),
        Average(EMA(0.5)),
        model=model,
    )
    views = {name: result.view(name).module for name in ("swa", "even", "part", "averaged")}
    assert float(views["swa"].weight) == pytest.approx(0.537359, abs=1e-6)
    assert float(views["even"].weight) == pytest.approx(0.607002, abs=1e-6)
    assert float(views["part"].weight) == float(views["swa"].weight)
    # the training is that of a run without averages; integers are those of the module.
    without = fit(model=model)
    np.testing.assert_array_equal(result.module.weight, without.module.weight)
    assert int(views["swa"].number) == 7


@pytest.mark.full
def test_averages_see_weights_that_fulfill_their_constraints() -> None:
    """Wherever they are listed. From 2 the weight falls by 1 a step, and stays at 0."""
    model = Scalar(jnp.full((), 2.0), jnp.int32(7), rate=1.0)
    result = fit(Average(Mean()), NonNegative("weight"), model=model, steps=4)
    assert float(result.module.weight) == 0
    averaged = float(result.view("averaged").module.weight)
    assert averaged == pytest.approx((1 + 0 + 0 + 0) / 4, rel=1e-6)


@pytest.mark.full
def test_a_mean_of_a_part_of_a_fit_holds_nothing_of_the_fit_before() -> None:
    """The weight is the number of the step."""
    rules = {
        "half": Mean(after=0.5),
        "all": Mean(after=0.0),
        "second": Mean(after=0.5, every=2),
        "third": Mean(after=0.3, every=3),
        "step": Mean(after=5),
    }
    plugins = [Average(rule, name=name) for name, rule in rules.items()]
    engine = fg.Engine(steps=8, autoload=False, plugins=plugins)
    first = engine.fit(Scalar(jnp.zeros(()), jnp.int32(7)), BATCHES)
    second = engine.fit(state=first.state, data=BATCHES)
    steps = {
        "half": np.arange(13, 17),
        "all": np.arange(9, 17),
        "second": [14, 16],
        "third": [13, 16],  # 2.4 of 8 steps are 2
        "step": np.arange(6, 17),
    }
    averages = {name: float(second.view(name).module.weight) for name in rules}
    expected = {name: float(np.mean(numbers)) for name, numbers in steps.items()}
    assert averages == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_lookahead_by_hand(step: int) -> None:
    expected = [(0.9, 1.0), (0.9, 0.9), (0.8, 0.9), (0.8, 0.8)]
    lookahead = Lookahead(2, 0.5)
    module, slow = (
        Scalar(jnp.ones(()), jnp.int32(7)),
        lookahead.init_plugin_state(Scalar(jnp.ones(()), jnp.int32(7))),
    )
    for _ in range(step):
        module = eqx.tree_at(lambda module: module.weight, module, module.weight - 0.1)
        module, slow = lookahead.after_update(module, slow, fg.Output())
    np.testing.assert_allclose((module.weight, slow.slow.weight), expected[step - 1], rtol=1e-6)


class Slope(fg.Module):
    """A weight whose gradient is the mean of the batch."""

    weight: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(jnp.mean(batch["x"]) * self.weight)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


def list_accumulated_weights(gradients: list[float], n: int) -> list[float]:
    """Return the weight after each update by the mean of `n` gradients, the last of what is left."""
    groups = [gradients[start : start + n] for start in range(0, len(gradients), n)]
    weights = [0.0]
    for group in groups:
        weights.append(weights[-1] - sum(group) / len(group))
    return weights[1:]


@pytest.mark.variants("full")
@pytest.mark.hook("after_finalize")
@pytest.mark.parametrize("num_steps", [8, 10])
@pytest.mark.parametrize("n", [2, 4])
def test_an_average_is_updated_once_for_each_update_of_accumulated_gradients(
    num_steps: int, n: int
) -> None:
    """The remainder at the end of training, of 10 steps by 4, is one more update."""
    gradients = [1.0, 2.0, -1.0, 0.5, 3.0, -2.0, 4.0, 1.5, -3.0, 2.5][:num_steps]
    batches = [{"x": np.full((2, 1), gradient, np.float32)} for gradient in gradients]
    plugins = [
        GradientAccumulation(n, "steps"),
        Average(EMA(0.5)),
        Average(Mean(), name="mean"),
        Average(EMA(0.5, every=2), name="second"),
    ]
    engine = fg.Engine(steps=num_steps, autoload=False, plugins=plugins)
    result = engine.fit(Slope(jnp.zeros(())), batches)
    weights = list_accumulated_weights(gradients, n)
    ema = second = 0.0
    for number, weight in enumerate(weights, start=1):
        ema = (ema + weight) / 2
        second = (second + weight) / 2 if number % 2 == 0 else second
    views = {
        name: float(result.view(name).module.weight) for name in ("averaged", "mean", "second")
    }
    assert views == pytest.approx(
        {"averaged": ema, "mean": sum(weights) / len(weights), "second": second}, rel=1e-6
    )


@pytest.mark.parametrize("num_steps", [8, 10])
def test_lookahead_moves_every_few_updates_of_accumulated_gradients(num_steps: int) -> None:
    gradients = [1.0, 2.0, -1.0, 0.5, 3.0, -2.0, 4.0, 1.5, -3.0, 2.5][:num_steps]
    batches = [{"x": np.full((2, 1), gradient, np.float32)} for gradient in gradients]
    plugins = [GradientAccumulation(2, "steps"), Lookahead(2, 0.5)]
    engine = fg.Engine(steps=num_steps, autoload=False, plugins=plugins)
    weight = slow = 0.0
    for number, start in enumerate(range(0, num_steps, 2), start=1):
        weight -= sum(gradients[start : start + 2]) / 2
        if number % 2 == 0:
            slow = weight = slow + (weight - slow) / 2
    result = engine.fit(Slope(jnp.zeros(())), batches)
    assert float(result.module.weight) == pytest.approx(weight, rel=1e-6)
    assert float(result.view("slow").module.weight) == pytest.approx(slow, rel=1e-6)


def test_a_skipped_update_leaves_the_average() -> None:
    batches = [*BATCHES[:2], {"x": np.full((2, 1), np.nan, np.float32)}, BATCHES[0]]
    engine = fg.Engine(
        steps=4, log_every=1, autoload=False, plugins=[Average(EMA(0.5))], on_nonfinite="skip"
    )
    result = engine.fit(Scalar(jnp.zeros(()), jnp.int32(7)), batches)
    assert (int(result.state.step), float(result.view("averaged").module.weight)) == (4, 2.125)


@pytest.mark.full
def test_an_average_is_resumed_and_loaded_as_weights(tmp_path: Any) -> None:
    checkpointer = Checkpointer(every=4)
    whole = fit(Average(EMA(0.5)), checkpointer, run_dir=tmp_path / "run")
    source = 'plugin_states["average:averaged"].module'
    path = fg.CheckpointRef(tmp_path / "run", step=4, map={"module": source}, strict=False)
    engine = fg.Engine(steps=1, autoload=False, plugins=[Checkpointer(every=9)],
                       run_dir=tmp_path / "next")  # fmt: skip
    with pytest.warns(UserWarning, match="in part"):
        result = engine.fit(Scalar(jnp.zeros(()), jnp.int32(7)), BATCHES, init_from=path)
    # Averages of 1, 2, 3, 4 by halves: .5, 1.25, 2.125, 3.0625; then one update.
    assert float(result.module.weight) == 4.0625
    again = fg.Engine(
        steps=8, log_every=1, autoload=False, plugins=[Average(EMA(0.5)), Checkpointer(every=4)],
        run_dir=tmp_path / "run",
    ).fit(Scalar(jnp.zeros(()), jnp.int32(7)), BATCHES, resume=4)  # fmt: skip
    np.testing.assert_array_equal(
        again.view("averaged").module.weight, whole.view("averaged").module.weight
    )


class Normalized(fg.Module):
    """A linear model after batch normalization."""

    norm: eqx.nn.BatchNorm
    linear: eqx.nn.Linear

    def __init__(self, mode: Any = "ema", *, key: Any) -> None:
        self.norm = eqx.nn.BatchNorm(3, "batch", mode=mode, momentum=0.9)
        self.linear = eqx.nn.Linear(3, 1, key=key)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        def predict(x: Any, state: Any) -> Any:
            x, state = self.norm(x, state)
            return self.linear(x), state

        preds, state = jax.vmap(predict, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
            batch["x"], ctx.model_state
        )
        return fg.Output(jnp.mean((preds - batch["y"]) ** 2), model_state=state)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def make_data() -> fg.ArrayData:
    x = np.random.default_rng(0).normal(2, 3, size=(40, 3)).astype(np.float32)
    return fg.ArrayData({"x": x, "y": x[:, :1]}, 8, shuffle=True)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["ema", pytest.param("batch", marks=pytest.mark.slow)])
def test_statistics_are_averaged_or_recomputed(mode: Any) -> None:
    def make(key: Any) -> Any:
        return eqx.nn.make_with_state(Normalized)(mode, key=key)

    engine = fg.Engine(
        steps=6,
        log_every=6,
        autoload=False,
        plugins=[
            Average(EMA(0.5)),
            Average(EMA(0.5), name="plain", statistics="current"),
            *(
                Evaluator(name, make_data(), every=6, module_view=name)
                for name in ("averaged", "plain", "current")
            ),
        ],
    )
    data = make_data()
    result = engine.fit(make, data)
    module = result.module
    index = module.norm.ema_state_index if mode == "ema" else module.norm.batch_state_index
    running, averaged, plain = (
        np.asarray(state.model_state.get(index)[0])
        for state in (result.state, result.view("averaged"), result.view("plain"))
        if state.model_state is not None
    )
    np.testing.assert_array_equal(plain, running)
    assert np.abs(averaged - running).min() > 1e-4
    metrics = [result.metrics[name]["loss"] for name in ("averaged", "plain", "current")]
    assert len(set(metrics)) == 3
    assert engine.evaluate(result.view("averaged"), data)["loss"] == pytest.approx(metrics[0])
    # exactly mean and variance of the data, whatever they were.
    exact = recompute_statistics(engine, result.view("averaged"), data)
    mean, variance = exact.model_state.get(index)
    if mode == "batch":
        scale = 1 - 0.9 ** float(exact.model_state.get(module.norm.batch_counter))
        mean, variance = mean / scale, variance / scale
    x = data.arrays["x"]
    np.testing.assert_allclose(mean, x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(variance, x.var(0), rtol=1e-5)
    # The arguments stay usable.
    assert engine.evaluate(result.view("averaged"), data)["loss"] == pytest.approx(metrics[0])


@pytest.mark.full
def test_averaged_statistics_of_all_steps_are_those_of_their_batches() -> None:
    """A layer of mode `batch` divides sums that begin at zero by a number that grows to 1; the mean
    over steps of both is that of the batches, each by how much it counts in the sums."""
    x = np.random.default_rng(0).normal(5, 2, size=(48, 3)).astype(np.float32)
    data = [{"x": rows, "y": rows[:, :1]} for rows in np.split(x, 6)]
    plugins = [Average(Mean()), Average(EMA(0.5), name="moving")]
    engine = fg.Engine(steps=6, plugins=plugins, autoload=False)
    result = engine.fit(lambda key: eqx.nn.make_with_state(Normalized)("batch", key=key), data)
    layer: Any = result.module.norm
    means = [rows.mean(0) for rows in np.split(x, 6)]
    # By the momentum of 0.9: how much the sum after each step holds of each batch.
    parts = np.array([[0.1 * 0.9 ** (t - i) if i <= t else 0 for i in range(6)] for t in range(6)])
    weights = {"averaged": np.ones(6), "moving": 0.5 ** np.arange(6, 0, -1)}
    for name, weight in weights.items():
        state: Any = result.view(name).model_state
        mean, _ = state.get(layer.batch_state_index)
        scale = 1 - 0.9 ** int(state.get(layer.batch_counter))
        expected = np.average(means, axis=0, weights=weight @ parts)
        np.testing.assert_allclose(mean / scale, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EMA(), "either decay or half_life"),
        (lambda: EMA(1.0), "decay is 1.0"),
        (lambda: EMA("0.9"), "decay is '0.9'"),  # pyright: ignore[reportArgumentType]
        (lambda: EMA(half_life=0), "half_life is 0"),
        (lambda: EMA(half_life=float("inf")), "half_life is inf"),
        (lambda: EMA(0.5, every=0), "every is 0"),
        (lambda: Mean(after=1.5), "after is 1.5"),
        (lambda: Average(0.5), "rule is 0.5"),  # pyright: ignore[reportArgumentType]
        (lambda: Average(EMA(0.5), name="current"), "name"),
        (lambda: Lookahead(0), "period"),
        (lambda: Lookahead(rate=0), "rate"),
    ],
)
def test_what_makes_no_sense_is_an_error(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_without_batch_normalization_there_is_nothing_to_recompute() -> None:
    result = fit(InMemoryCheckpointer(), steps=1)
    with pytest.raises(FulguriteError, match=r"no eqx\.nn\.BatchNorm"):
        recompute_statistics(fg.Engine(steps=1), result, BATCHES)


@pytest.mark.full
def test_statistics_are_averaged_with_microbatches_too() -> None:
    """Found by random programs: the output of such a step had no model state."""

    def make(key: Any) -> Any:
        return eqx.nn.make_with_state(Normalized)("ema", key=key)

    plugins = [Average(EMA(0.5)), GradientAccumulation(2)]
    result = fg.Engine(steps=3, plugins=plugins, autoload=False).fit(make, make_data())
    index = result.module.norm.ema_state_index
    states = [state.model_state for state in (result.state, result.view("averaged"))]
    running, averaged = (np.asarray(state.get(index)[0]) for state in states if state is not None)
    assert np.isfinite(averaged).all() and np.abs(averaged - running).min() > 1e-4


@pytest.mark.full
def test_averages_of_complex_weights() -> None:
    """The gradient by a number of its real part times `3 - 4j` is `3 + 4j`."""

    class Complex(Scalar):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(jnp.real(self.weight * (3 - 4j)) * jnp.mean(batch["x"]))

    plugins = [Average(EMA(0.5)), Average(Mean(), name="mean")]
    result = fit(*plugins, model=Complex(jnp.zeros((), jnp.complex64), jnp.int32(7)), steps=3)
    views = {name: result.view(name).module.weight for name in ("averaged", "mean")}
    np.testing.assert_allclose(result.module.weight, 3 * (3 + 4j))
    np.testing.assert_allclose(views["averaged"], 2.125 * (3 + 4j))
    np.testing.assert_allclose(views["mean"], 2 * (3 + 4j))
    slow = fit(Lookahead(2, 0.5), model=Complex(jnp.zeros((), jnp.complex64), jnp.int32(7)))
    np.testing.assert_allclose(slow.module.weight, 4 * (3 + 4j))


class Student(fg.Module):
    """Learns behind a teacher in inference mode, whose statistics are of other data."""

    teacher: eqx.nn.BatchNorm
    norm: eqx.nn.BatchNorm
    unused: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    linear: eqx.nn.Linear

    def __init__(self, mode: Any, *, key: Any) -> None:
        teacher = eqx.nn.BatchNorm(3, "batch", mode=mode, momentum=0.9)
        self.teacher = eqx.nn.inference_mode(teacher)
        self.norm = eqx.nn.BatchNorm(3, "batch", mode=mode, momentum=0.9)
        self.unused = eqx.nn.BatchNorm(3, "batch", mode=mode, momentum=0.9)
        self.dropout = eqx.nn.Dropout(0.5, inference=True)
        self.linear = eqx.nn.Linear(3, 1, key=key)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        def predict(x: Any, state: Any) -> Any:
            x, state = self.teacher(x, state)
            x, state = self.norm(self.dropout(x), state)
            return self.linear(x), state

        apply = jax.vmap(predict, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        preds, state = apply(batch["x"], ctx.model_state)
        return fg.Output(jnp.mean((preds - batch["y"]) ** 2), model_state=state)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_only_statistics_that_training_updates_are_recomputed(mode: Any) -> None:
    """The teacher has a mean of 7 and a variance of 4 after two updates, and its `eps` is 1e-5; the
    layer after it sees what it makes of the data."""
    module, state = eqx.nn.make_with_state(Student)(mode, key=jax.random.key(0))
    scale = np.float32(1 if mode == "ema" else 1 - 0.9**2)
    statistics = (jnp.full(3, 7 * scale), jnp.full(3, 4 * scale))

    def get_index(layer: Any) -> Any:
        return layer.ema_state_index if mode == "ema" else layer.batch_state_index

    for layer in (module.teacher, module.unused):
        state = state.set(get_index(layer), statistics)
        if mode == "batch":
            counter: Any = layer.batch_counter
            state = state.set(counter, jnp.array(2))
    data = make_data()
    _, exact = recompute_statistics(fg.Engine(steps=1), (module, state), data)
    for layer in (module.teacher, module.unused):
        for recomputed, before in zip(exact.get(get_index(layer)), statistics, strict=True):
            np.testing.assert_array_equal(recomputed, before)
    inputs = (data.arrays["x"] - 7) / np.sqrt(4 + 1e-5)
    mean, variance = exact.get(get_index(module.norm))
    np.testing.assert_allclose(mean, inputs.mean(0), rtol=1e-4)
    np.testing.assert_allclose(variance, inputs.var(0), rtol=1e-4)
    frozen = eqx.nn.inference_mode(module)
    with pytest.raises(ModelError, match=r"statistics of no eqx\.nn\.BatchNorm.*inference mode"):
        recompute_statistics(fg.Engine(steps=1), (frozen, state), data)


class Deep(fg.Module):
    """Two normalizations of pictures, with a square between them."""

    first: eqx.nn.BatchNorm
    second: eqx.nn.BatchNorm
    axes: Any = eqx.field(static=True)

    def __init__(self, mode: Any, axes: Any = "batch", *, key: Any = None) -> None:
        self.first = eqx.nn.BatchNorm(3, axes, mode=mode, momentum=0.9)
        self.second = eqx.nn.BatchNorm(3, axes, mode=mode, momentum=0.9)
        self.axes = axes

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        def predict(x: Any, state: Any) -> Any:
            x, state = self.first(x, state)
            return self.second(x**2, state)

        apply = predict
        for name in [self.axes] if isinstance(self.axes, str) else reversed(self.axes):
            apply = jax.vmap(apply, axis_name=name, in_axes=(0, None), out_axes=(0, None))
        preds, state = apply(batch["x"], ctx.model_state)
        return fg.Output(
            fg.metrics.Mean.from_values(preds.mean((1, 2)), ctx.mask), model_state=state
        )


@pytest.mark.full
@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_padding_is_no_part_of_recomputed_statistics(mode: Any) -> None:
    """The last of the batches of 8 has 3 examples; the second layer sees what the first makes of each."""
    x = np.random.default_rng(0).normal(2, 3, size=(19, 3, 4)).astype(np.float32)
    batches = [x[:8], x[8:16], x[16:]]
    padded = [
        fg.Batch(
            {"x": np.concatenate([rows, np.full((8 - len(rows), 3, 4), np.nan, np.float32)])},
            np.arange(8) < len(rows),
        )
        for rows in batches
    ]
    sources = [fg.ArrayData({"x": x}, 8, remainder="pad"), padded]
    module, state = eqx.nn.make_with_state(Deep)(mode)
    squares = [
        (rows - rows.mean((0, 2), keepdims=True)) ** 2 / (rows.var((0, 2), keepdims=True) + 1e-5)
        for rows in batches
    ]
    inputs = [x, np.concatenate(squares)]
    for source in sources:
        _, exact = recompute_statistics(fg.Engine(steps=1), (module, state), source)
        for layer, rows in zip((module.first, module.second), inputs, strict=True):
            index: Any = layer.ema_state_index if mode == "ema" else layer.batch_state_index
            mean, variance = exact.get(index)
            np.testing.assert_allclose(mean, rows.mean((0, 2)), rtol=1e-4)
            np.testing.assert_allclose(variance, rows.var((0, 2)), rtol=1e-4)


@pytest.mark.full
def test_recomputed_statistics_of_a_large_mean_are_exact() -> None:
    """In float32 the difference of the second moment and the squared mean is off by a tenth."""
    x = np.random.default_rng(0).normal(1000, 1, size=(160, 3)).astype(np.float32)
    model = eqx.nn.make_with_state(Normalized)(key=jax.random.key(0))
    data = fg.ArrayData({"x": x, "y": x[:, :1]}, 8)
    module, exact = recompute_statistics(fg.Engine(steps=1), model, data)
    mean, variance = exact.get(module.norm.ema_state_index)
    np.testing.assert_allclose(mean, x.mean(0, np.float64), rtol=1e-6)
    np.testing.assert_allclose(variance, x.var(0, np.float64), rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_statistics_without_padding_stay_in_float32_where_layers_compute_in_bfloat16(
    mode: Any,
) -> None:
    x = np.random.default_rng(0).normal(2, 3, size=(19, 3)).astype(np.float32)
    model = eqx.nn.make_with_state(Normalized)(mode, key=jax.random.key(0))
    data = fg.ArrayData({"x": x, "y": x[:, :1]}, 8, remainder="pad")
    engine = fg.Engine(steps=1, plugins=[Precision("bf16")])
    module, exact = recompute_statistics(engine, model, data)
    index = module.norm.ema_state_index if mode == "ema" else module.norm.batch_state_index
    mean, variance = exact.get(index)
    half = np.float32(jnp.bfloat16(x))
    np.testing.assert_allclose(mean, half.mean(0), rtol=1e-5)
    np.testing.assert_allclose(variance, half.var(0), rtol=1e-5)


def test_padding_of_an_unknown_axis_is_refused() -> None:
    module, state = eqx.nn.make_with_state(Deep)("batch", ("batch", "place"))
    batch = fg.Batch({"x": np.ones((8, 5, 3), np.float32)}, np.arange(8) < 6)
    with pytest.raises(ModelError, match=r"8 rows has padding.*'batch' of size 8, 'place' of size"):
        recompute_statistics(fg.Engine(steps=1), (module, state), [batch])


def run_batch_norm(rows: np.ndarray) -> np.ndarray:
    """Return what a layer with its initial weights makes of a batch."""
    spread = np.sqrt(rows.var((0, 2), keepdims=True) + 1e-5)
    return (rows - rows.mean((0, 2), keepdims=True)) / spread


@pytest.mark.full
@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_statistics_that_training_keeps_are_kept(mode: Any) -> None:
    """What is frozen at some steps only, and what keeps changing, is recomputed."""
    x = np.random.default_rng(0).normal(2, 3, size=(16, 3, 4)).astype(np.float32)
    data = fg.ArrayData({"x": x}, 8)
    module, state = eqx.nn.make_with_state(Deep)(mode)
    indices: list[Any] = [
        layer.ema_state_index if mode == "ema" else layer.batch_state_index
        for layer in (module.first, module.second)
    ]
    state = state.set(indices[0], (7 * jnp.ones(3), 5 * jnp.ones(3)))

    def train(plugin: Any) -> tuple[Any, Any]:
        """Return the model states after three steps, and with recomputed statistics."""
        engine = fg.Engine(steps=3, plugins=[plugin], autoload=False)
        result = engine.fit((module, jax.tree.map(jnp.copy, state)), data)
        return result.model_state, recompute_statistics(engine, result, data).model_state

    trained, exact = train(Freeze("first"))
    np.testing.assert_array_equal(trained.get(indices[0]), [[7] * 3, [5] * 3])
    np.testing.assert_array_equal(exact.get(indices[0]), [[7] * 3, [5] * 3])
    # The layer after it is trained. Its running average begins at zero in the mode `batch`.
    scale = 1 if mode == "ema" else 1 - 0.9**3
    inputs = np.concatenate([run_batch_norm(x[:8]), run_batch_norm(x[8:])]) ** 2
    np.testing.assert_allclose(exact.get(indices[1])[0], scale * inputs.mean((0, 2)), rtol=1e-4)

    _, exact = train(Freeze("first", train_statistics=True))
    np.testing.assert_allclose(exact.get(indices[0])[0], scale * x.mean((0, 2)), rtol=1e-4)
    _, exact = train(Freeze("first", since=2))
    assert np.abs(exact.get(indices[0])[0] - 7).min() > 1
    frozen = fg.Engine(steps=1, plugins=[Freeze("**")], autoload=False)
    with pytest.raises(ModelError, match="out of Freeze"):
        recompute_statistics(frozen, (module, state), data)
