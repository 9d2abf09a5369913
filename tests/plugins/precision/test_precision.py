"""Dtypes of the computation, and loss scaling."""

import warnings
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, FulguriteError, ModelError
from fulgurite_averaging import EMA, Average
from fulgurite_optimizers import GradientAccumulation, GradientClip, MultiOptimizer, Phase
from fulgurite_precision import Dynamic, Precision, Static
from fulgurite_precision.casting import cast_params
from fulgurite_precision.scaling import ScaleState
from fulgurite_stopping import SpikeDetection


def adjust(scale: Dynamic, start: float, flags: str) -> list[float]:
    """Return the scale after each update: `T` for a finite one, `F` for another."""
    state = ScaleState(jnp.float32(start), jnp.int32(0), jnp.bool_(True))
    step = jax.jit(scale.adjust)
    scales = []
    for flag in flags:
        state = step(state, jnp.bool_(flag == "T"))
        scales.append(float(state.scale))
    return scales


@pytest.mark.parametrize(
    ("scale", "start", "flags", "expected"),
    [
        (Dynamic(period=2), 2.0**15, "TTTFFTT",
         [32768, 65536, 65536, 32768, 16384, 16384, 32768]),
        (Dynamic(period=20), 10, "T" * 20, [10] * 19 + [20]),
        (Dynamic(), 10, "F" * 5, [5, 2.5, 1.25, 1, 1]),
        (Dynamic(minimum=0.25), 4, "F" * 6, [2, 1, 0.5, 0.25, 0.25, 0.25]),
        (Dynamic(4, period=1, maximum=16), 4, "TTT", [8, 16, 16]),
    ],
)  # fmt: skip
def test_the_scale_adapts(scale: Dynamic, start: float, flags: str, expected: list[float]) -> None:
    assert adjust(scale, start, flags) == expected


def make_batch(gradient: float) -> dict[str, np.ndarray]:
    return {"x": np.ones(2, np.float32), "gradient": np.full(2, gradient, np.float32)}


class Tiny(fg.Module):
    """A weight whose gradient is what the batch says, too small for float16."""

    weight: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        ctx.add_loss("added", 0 * self.weight)
        preds = self.weight * batch["x"]
        return fg.Output(preds[0].astype(jnp.float32) * batch["gradient"][0], preds=preds)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1e6)


@pytest.mark.full
def test_gradients_survive_and_losses_are_not_scaled() -> None:
    # Two of the six overflow: 2e4 times a scale of 32768 and more is infinite in float16.
    values = [1e-8, 1e-8, 2e4, 1e-8, 1e-8, 2e4]
    batches = [make_batch(value) for value in values]

    class PassedOn:
        """Multiplies in float16 by a number that float32 has made."""

        @fg.hookimpl
        def loss_terms(self, module: Any, output: fg.Output, ctx: fg.Context) -> Any:
            return {"preds": 0 * jnp.sum(output.preds)}

    engine = fg.Engine(
        steps=6,
        log_every=1,
        autoload=False,
        plugins=[
            Precision("fp16", scale=Dynamic(period=2), keep="gradient"),
            Average(EMA(0.5)),
            PassedOn(),
        ],
        on_nonfinite="skip",
    )
    result = engine.fit(Tiny(jnp.ones(())), batches)
    # Four updates of 0.01 each, up to what float16 leaves of 1e-8 * 32768.
    assert float(result.module.weight) == pytest.approx(0.96, abs=2e-4)
    assert int(result.state.step) == 6
    assert result.metrics["train"]["skipped_steps"] == 2
    scales = result.history["train/precision/loss_scale"]
    # Of a step that was left out no metrics are logged.
    assert set(scales.tolist()) == {32768.0}
    assert float(result.state.plugin_states["precision"].scale) == 65536
    # The average saw the four updates alone, and the loss is that of the model.
    expected = 1.0
    for weight in (0.99, 0.98, 0.97, 0.96):
        expected = 0.5 * expected + 0.5 * weight
    assert float(result.view("averaged").module.weight) == pytest.approx(expected, abs=2e-4)
    assert result.history["train/loss"][0] < 1e-7


class Two(fg.Module):
    """Two weights with a loss each, whose gradients are what the batch says."""

    a: jax.Array
    b: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        losses = {
            name: (getattr(self, name) * batch["x"][0]).astype(jnp.float32)
            * batch[f"gradient_{name}"]
            for name in ("a", "b")
        }
        return fg.Output(losses={name: loss[0] for name, loss in losses.items()})


def fit_half(model: Any, batches: list[Any], *plugins: Any) -> fg.FitResult:
    """Train in float16 with a scale of 32768 that halves, and check that a step is left out."""
    precision = Precision("fp16", keep=fg.select("gradient*"))
    engine = fg.Engine(
        steps=len(batches),
        log_every=1,
        autoload=False,
        plugins=[precision, *plugins],
        on_nonfinite="skip",
    )
    result = engine.fit(model, batches)
    assert result.metrics["train"]["skipped_steps"] == 1
    assert float(result.state.plugin_states["precision"].scale) == 2**14
    return result


@pytest.mark.full
def test_overflow_of_a_microbatch_leaves_the_whole_update_out() -> None:
    batches = [make_batch(1e-8), make_batch(1e-8)]
    batches[0]["gradient"][1] = 2e4
    accumulation = GradientAccumulation(2, assume_mean=True)
    result = fit_half(Tiny(jnp.ones(())), batches, accumulation)
    assert float(result.module.weight) == pytest.approx(0.99, abs=1e-4)
    assert int(result.state.opt_state["default"].updates) == 1


@pytest.mark.full
def test_overflow_of_a_phase_leaves_the_whole_update_out() -> None:
    phases: dict[str, Any] = {name: Phase(optax.sgd(1e6), name) for name in ("a", "b")}
    small = np.full(1, 1e-8, np.float32)
    batch = {"x": np.ones(1, np.float32), "gradient_a": small, "gradient_b": small}
    batches = [{**batch, "gradient_b": np.full(1, 2e4, np.float32)}, batch]
    result = fit_half(Two(jnp.ones(()), jnp.ones(())), batches, MultiOptimizer(**phases))
    for weight in (result.module.a, result.module.b):
        assert float(weight) == pytest.approx(0.99, abs=1e-4)
    assert [int(state.updates) for state in result.state.opt_state.values()] == [1, 1]


@pytest.mark.full
def test_an_overflow_that_is_clipped_by_value_is_one() -> None:
    """The gradient of infinity would become that of the limit, and the scale would never fall."""
    batches = [make_batch(2e4), make_batch(1e-8)]
    result = fit_half(Tiny(jnp.ones(())), batches, GradientClip(max_value=1e-8))
    assert float(result.module.weight) == pytest.approx(0.99, abs=1e-4)


class Offset(fg.Module):
    """A weight whose gradient is what the batch says, and a loss as high as the batch says."""

    weight: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        loss = (self.weight * batch["x"][0]).astype(jnp.float32) * batch["gradient"][0]
        return fg.Output(loss + jax.lax.stop_gradient(batch["offset"][0] - loss))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1e6)


@pytest.mark.full
@pytest.mark.parametrize("is_first", [True, False], ids=["spikes_first", "precision_first"])
def test_a_spike_of_the_loss_is_no_overflow_of_its_scale(is_first: bool) -> None:
    """Step 4 has a spike, and step 6 gradients that overflow."""
    batches = [make_batch(1e-8) | {"offset": np.ones(2, np.float32)} for _ in range(7)]
    batches[3]["offset"][:] = 100
    batches[5]["gradient"][:] = 2e4
    scales: list[float] = []

    def note(run: fg.Run) -> None:
        scales.append(float(run.state.plugin_states["precision"].scale))

    plugins: list[Any] = [
        SpikeDetection(window=2, action="skip"),
        Precision("fp16", scale=Dynamic(period=100), keep=fg.select("gradient", "offset")),
    ]
    engine = fg.Engine(
        steps=7,
        plugins=[*plugins[:: 1 if is_first else -1], fg.LambdaPlugin(every={1: note})],
        on_nonfinite="skip",
        log_every=1,
        autoload=False,
    )
    result = engine.fit(Offset(jnp.ones(())), batches)
    assert result.metrics["train"]["skipped_steps"] == 2
    # The step after an overflow has the smaller scale.
    assert scales == [2**15] * 6 + [2**14]
    assert float(result.module.weight) == pytest.approx(0.95, abs=2e-4)


def test_without_scaling_small_gradients_vanish_and_it_warns() -> None:
    with pytest.warns(UserWarning, match="gradients below 6e-8 are zero"):
        plugin = Precision(compute="float16", keep="gradient")
    engine = fg.Engine(steps=2, log_every=1, autoload=False, plugins=[plugin])
    result = engine.fit(Tiny(jnp.ones(())), [make_batch(1e-8)] * 2)
    assert float(result.module.weight) == 1.0


class Net(fg.Module):
    """Two layers with both kinds of norms, and a note of what they compute in."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    layer_norm: eqx.nn.LayerNorm
    last: eqx.nn.Linear
    number: jax.Array

    def __init__(self, mode: Any = "ema", *, key: Any) -> None:
        self.first = eqx.nn.Linear(4, 8, key=key)
        self.norm = eqx.nn.BatchNorm(8, "batch", mode=mode)
        self.layer_norm = eqx.nn.LayerNorm(8)
        self.last = eqx.nn.Linear(8, 3, key=key)
        self.number = jnp.int32(3)

    def __call__(self, x: Any, state: Any) -> Any:
        hidden = self.first(x)
        SEEN["hidden"] = hidden.dtype
        hidden, state = self.norm(hidden, state)
        SEEN["norm"] = hidden.dtype
        hidden = self.layer_norm(hidden)
        return self.last(hidden), state

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        apply = jax.vmap(self, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        logits, state = apply(batch["x"], ctx.model_state)
        SEEN.update(
            logits=logits.dtype,
            label=batch["label"].dtype,
            target=batch["target"].dtype,
            layer_norm=jnp.result_type(self.layer_norm.weight),
            key=ctx.key().dtype,
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch["label"]
        )
        return fg.Output(losses.mean(), preds=logits, model_state=state)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


SEEN: dict[str, Any] = {}


def make_batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(size=(8, 4)).astype(np.float32),
            "label": rng.integers(0, 3, 8, np.int32),
            "target": np.ones(8, np.float32),
        }
    ] * 4


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("ema", marks=pytest.mark.full),
        pytest.param("batch", marks=pytest.mark.slow),
    ],
)
def test_dtypes_of_parameters_computation_and_output(mode: Any) -> None:
    class Texts:
        """Keeps the programs."""

        programs: dict[str, str] = {}  # noqa: RUF012

        @fg.hookimpl
        def on_compile(self, name: str, jaxpr: Any) -> None:
            self.programs[name] = str(jaxpr)

    plugin = Precision("bf16", exclude="**.layer_norm", keep="target")
    engine = fg.Engine(steps=4, log_every=4, autoload=False, plugins=[plugin, texts := Texts()])
    result = engine.fit(lambda key: eqx.nn.make_with_state(Net)(mode, key=key), make_batches())
    bfloat16, float32 = jnp.bfloat16, jnp.float32
    assert {name: SEEN[name] for name in ("hidden", "norm", "logits")} == {
        "hidden": bfloat16, "norm": bfloat16, "logits": bfloat16
    }  # fmt: skip
    assert (SEEN["layer_norm"], SEEN["target"], SEEN["label"]) == (float32, float32, jnp.int32)
    assert jnp.issubdtype(SEEN["key"], jax.dtypes.prng_key)
    # Master weights, optimizer and statistics.
    state = result.state
    floats = eqx.filter((state.module, state.opt_state, state.model_state), eqx.is_inexact_array)
    assert {leaf.dtype for leaf in jax.tree.leaves(floats)} == {jnp.dtype(float32)}
    assert state.module.number.dtype == jnp.int32
    assert "number" in repr(state.module)
    assert np.isfinite(result.history["train/loss"]).all()
    # The products are in bfloat16, here, in an evaluation and in a prediction.
    batch = make_batches()[:1]
    metrics = engine.evaluate(result, batch)
    preds: Any = engine.predict(result, batch)
    assert preds.dtype == float32
    assert np.isfinite(metrics["loss"])
    for program in ("step", "evaluate.test", "predict"):
        products = [line for line in texts.programs[program].splitlines() if "dot_general" in line]
        results = [line.partition("=")[0] for line in products]
        assert any("bf16" in text for text in results), program
        # Only the checks that everything is finite multiply float32 numbers.
        assert program == "step" or all("bf16" in text for text in results)
    # As the same model in float32, up to bfloat16.
    plain = fg.Engine(steps=4, log_every=4, autoload=False)
    reference = plain.fit(lambda key: eqx.nn.make_with_state(Net)(mode, key=key), make_batches())
    np.testing.assert_allclose(
        result.history["train/loss"], reference.history["train/loss"], rtol=0.03
    )


@pytest.mark.full
def test_the_loss_of_a_task_is_computed_in_float32() -> None:
    dtypes: list[Any] = []

    def loss(preds: Any, batch: Any) -> Any:
        dtypes.extend([preds.dtype, batch[1].dtype])
        return jnp.mean((preds - batch[1]) ** 2, -1)

    task = fg.Task(
        eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0)), loss=loss, optimizer=optax.sgd(0.1)
    )
    batches = [(np.ones((4, 4), np.float32), np.full((4, 2), 1 / 3, np.float32))] * 2
    engine = fg.Engine(steps=2, log_every=1, autoload=False, plugins=[Precision()])
    result = engine.fit(task, batches)
    assert set(dtypes) == {jnp.dtype(jnp.float32)}
    module: Any = result.module
    assert module.model.layers[0].weight.dtype == jnp.float32


def test_the_model_of_a_task_gets_what_is_kept_as_it_is() -> None:
    dtypes: list[Any] = []

    def forward(model: Any, batch: Any, ctx: fg.Context) -> Any:
        dtypes.append((batch["place"].dtype, batch["image"].dtype))
        return jax.vmap(model)(batch["image"])

    task = fg.Task(
        eqx.nn.Linear(4, 2, key=jax.random.key(0)),
        loss=lambda preds, batch: jnp.mean(preds),
        forward=forward,
        optimizer=optax.sgd(0.1),
    )
    batch = {"place": np.ones((2, 2), np.float32), "image": np.ones((2, 4), np.float32)}
    engine = fg.Engine(steps=1, autoload=False, plugins=[Precision(keep="place")])
    engine.init_state(task, [batch])
    assert set(dtypes) == {(jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))}


@pytest.mark.full
def test_parameters_may_have_another_dtype() -> None:
    task = fg.Task(
        eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0)),
        loss=lambda preds, batch: jnp.mean((preds - batch[1]) ** 2, -1),
        optimizer=optax.adam(0.1),
    )
    batches = [(np.ones((4, 4), np.float32), np.full((4, 2), 1 / 3, np.float32))] * 4
    plugin = Precision("bf16-true", exclude="layers[1]")
    engine = fg.Engine(steps=4, log_every=1, autoload=False, plugins=[plugin])
    result = engine.fit(task, batches)
    module: Any = result.module
    first, last = module.model.layers
    adam: Any = result.state.opt_state[1][0]
    half = (first.weight, first.bias, adam.mu.model.layers[0].weight, adam.nu.model.layers[0].bias)
    assert {leaf.dtype for leaf in half} == {jnp.dtype(jnp.bfloat16)}
    assert (last.weight.dtype, last.bias.dtype) == (jnp.float32, jnp.float32)
    losses = result.history["train/loss"]
    assert losses[-1] < losses[0]
    assert np.isfinite(engine.evaluate(result, batches)["loss"])
    # A fit that continues with it, and a loop, train what was cast once.
    again = engine.fit(data=batches, state=result.state, steps=1)
    assert again.module.model.layers[0].weight.dtype == jnp.bfloat16


def test_batch_norm_and_integers_keep_their_dtypes() -> None:
    module: Any = jax.eval_shape(
        lambda key: cast_params(
            eqx.filter(Net(key=key), eqx.is_array), "bfloat16", fg.select("**.layer_norm")
        ),
        jax.random.key(0),
    )
    bfloat16, float32 = jnp.bfloat16, jnp.float32
    dtypes = {
        name: {leaf.dtype for leaf in jax.tree.leaves(getattr(module, name))}
        for name in ("first", "norm", "layer_norm", "number")
    }
    assert dtypes["first"] == {jnp.dtype(bfloat16)}
    assert jnp.dtype(bfloat16) not in dtypes["norm"]
    assert dtypes["layer_norm"] == {jnp.dtype(float32)}
    assert dtypes["number"] == {jnp.dtype(jnp.int32)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Precision("fp64"), "preset"),  # pyright: ignore[reportArgumentType]
        (lambda: Precision(compute="int8"), "compute is 'int8'"),
        (lambda: Precision(params="int8"), "params is 'int8'"),
        (lambda: Precision(output="half float"), "output is 'half float'"),
        (lambda: Precision(scale=1024.0), "scale is 1024.0"),  # pyright: ignore
        (lambda: Dynamic(period=0), "period is 0"),
        (lambda: Dynamic(factor=1.0), "factor is 1.0"),
        (lambda: Dynamic(minimum=0.0), "minimum is 0.0"),
        (lambda: Dynamic(maximum=2.0**10), "initial is 32768.0, .* maximum 1024.0; .* between"),
        (lambda: Dynamic(initial=0.5), "initial is 0.5, minimum 1.0 .* between"),
        (lambda: Dynamic(initial="8"), "initial is '8'; .* number"),  # pyright: ignore
        (lambda: Static(-1.0), "scale is -1.0"),
    ],
)
def test_what_makes_no_sense_is_an_error(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_a_scale_needs_an_engine_that_skips() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin = Precision("fp16")
    engine = fg.Engine(steps=1, autoload=False, plugins=[plugin])
    with pytest.raises(FulguriteError, match="on_nonfinite='skip'"):
        engine.fit(Tiny(jnp.ones(())), [make_batch(1.0)])


@pytest.mark.full
def test_a_scaled_loss_leaves_complex_gradients_as_they_are() -> None:
    """Each step takes a fifth of the distance from 3 + 4j."""

    class Target(fg.Module):
        z: jax.Array

        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(jnp.mean(jnp.abs(self.z - batch) ** 2))

        def configure_optimizers(self) -> Any:
            return optax.sgd(0.1)

    plugin = Precision("fp32", scale=Static(1024))
    engine = fg.Engine(steps=5, on_nonfinite="skip", plugins=[plugin])
    module = engine.fit(
        Target(jnp.zeros((), jnp.complex64)), [np.array([3 + 4j], np.complex64)]
    ).module
    np.testing.assert_allclose(module.z, (3 + 4j) * (1 - 0.8**5), rtol=1e-6)


def test_gradients_from_elsewhere_are_an_error() -> None:
    """They are those of a loss without its scale, which small ones do not survive."""

    class Own(fg.Engine):
        def train_step(self, state: Any, batch: Any, ctx: fg.Context, update_rule: Any) -> Any:
            grads, output = fg.compute_gradients(self.forward, state.module, batch, ctx)
            return update_rule.apply_gradients(state, grads, output)

    def init_state(*plugins: Any) -> Any:
        engine = Own(steps=1, plugins=plugins, on_nonfinite="skip", autoload=False)
        return engine.init_state(Tiny(jnp.ones(())), [make_batch(1e-8)])

    with pytest.raises(ModelError, match=r"call update_rule\(self.forward, state, batch, ctx\)"):
        init_state(Precision("fp16"))
    assert init_state(Precision("bf16")).step == 0
