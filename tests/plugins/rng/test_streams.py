"""Keys, against folds written out here with `jax.random.fold_in` and `hashlib`."""

import hashlib
import os
import subprocess
import sys
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite._src.rng import fold_name
from fulgurite.errors import ConfigurationError, ModelError, PluginError
from fulgurite_rng import Dropout, Rng, RngStream, rng_context
from jaxtyping import Array, Key, UInt32
from numpy.testing import assert_allclose, assert_array_equal

BATCHES = [{"x": np.ones((2, 1), np.float32)} for _ in range(3)]
NOISE = RngStream("noise", train=True, eval=True)


def folded(seed: int, *parts: str | int) -> UInt32[np.ndarray, "2"]:
    """The bits of a key folded with each of `parts`, strings by the first four bytes of their
    SHA-1, big-endian."""
    key = jax.random.key(seed)
    for part in parts:
        number = (
            part if isinstance(part, int) else int(hashlib.sha1(part.encode()).hexdigest()[:8], 16)
        )
        key = jax.random.fold_in(key, np.uint32(number))
    return bits(key)


def bits(key: Key[Array, ""]) -> UInt32[np.ndarray, "2"]:
    return np.asarray(jax.random.key_data(key))


def halves(key: Key[Array, ""]) -> UInt32[Array, "2 2"]:
    """The upper and the lower 16 bits of a key's words: a metric is float32, which holds these
    exactly."""
    data = jax.random.key_data(key)
    return jnp.stack([data >> 16, data & 0xFFFF])


def joined(shown: Any) -> UInt32[np.ndarray, "*steps 2"]:
    """The bits of keys again, of their halves as they were logged."""
    words = np.asarray(shown).astype(np.uint32)
    return words[..., 0, :] << 16 | words[..., 1, :]


class Kept(fg.metrics.CollectingMetric):
    values: Any

    def compute(self) -> Any:
        return self.values


class Witness(fg.Module):
    """Shows the keys that it draws, in training and in evaluation."""

    weight: Array
    made_from: Array
    streams: tuple[str, ...]

    def __init__(self, *streams: str, key: Key[Array, ""]) -> None:
        self.weight = jnp.ones(())
        self.made_from = jax.random.key_data(key)
        self.streams = streams

    def training_step(self, batch: dict[str, Array], ctx: fg.Context) -> fg.Output:
        return fg.Output(
            self.weight**2,
            metrics={
                name: fg.metrics.LastValue.from_values(halves(ctx.key(name)))
                for name in self.streams
            },
        )

    def validation_step(self, batch: dict[str, Array], ctx: fg.Context) -> fg.Output:
        drawn = {name: jax.random.key_data(ctx.key(name)) for name in self.streams}
        return fg.Output(
            metrics={name: Kept(jnp.ones(1, bool), data[None]) for name, data in drawn.items()}
        )

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def witness(*streams: str) -> Any:
    return lambda *, key: Witness(*streams, key=key)


def drawn(result: fg.FitResult, name: str) -> UInt32[np.ndarray, "steps 2"]:
    """The bits that training drew from stream `name` at each step."""
    return joined(result.history[f"train/{name}"])


def trained(*streams: str, steps: int = 9, plugins: list[Any], **options: Any) -> fg.FitResult:
    return fg.Engine(steps=steps, seed=0, log_every=1, plugins=plugins, **options).fit(
        witness(*streams), BATCHES
    )


class Drawing:
    """A plugin that declares a stream, keeps a random slice, and draws in the step and shows
    what."""

    @fg.hookimpl
    def register_rng_streams(self) -> list[RngStream]:
        return [RngStream("drawing", train=True)]

    @fg.hookimpl
    def init_plugin_state(self, module: Any, key: Key[Array, ""]) -> Array:
        return jax.random.normal(key)

    @fg.hookimpl
    def step_metrics(self, ctx: fg.Context) -> dict[str, fg.metrics.LastValue]:
        return {"dropout": fg.metrics.LastValue.from_values(halves(ctx.key("dropout")))}


# --- the key --------------------------------------------------------------------------------------


def test_the_key_of_dropout_at_step_7_has_the_same_bits_everywhere():
    expected = folded(0, "dropout", 7, "train")
    alone, among_others = (
        Rng(),
        Rng(RngStream("a", train=True), NOISE, RngStream("zz", train=True, per_step=False)),
    )
    for rng in (alone, among_others):
        streams = rng.make_streams(0)
        assert_array_equal(bits(streams.train_keys(7)["dropout"]), expected)
        assert_array_equal(
            bits(jax.jit(lambda step, s=streams: s.train_keys(step)["dropout"])(7)), expected
        )
        assert_array_equal(
            bits(rng.make_streams(jax.random.key(0)).key("dropout", "train", jnp.int32(7))),
            expected,
        )
    for plugins in ([alone], [among_others], [among_others, Drawing()], [Drawing(), alone]):
        assert_array_equal(drawn(trained("dropout", plugins=plugins), "dropout")[7], expected)


def test_keys_differ_between_steps_streams_phases_and_seeds():
    streams = Rng(RngStream("dropout", init=True, train=True, eval=True)).make_streams(0)
    keys = [
        streams.train_keys(7)["dropout"],
        streams.train_keys(8)["dropout"],
        streams.train_keys(7)["default"],
        streams.init_keys()["dropout"],
        streams.key("dropout", "eval", 7),
        streams.eval_keys("test", 7)["dropout"],
        Rng().make_streams(1).train_keys(7)["dropout"],
    ]
    assert len({bits(key).tobytes() for key in keys}) == len(keys)


@pytest.mark.full
def test_n_steps_draw_the_keys_of_n_steps():
    result = trained("default", "dropout", steps=9, plugins=[Rng()])
    for name in ("default", "dropout"):
        assert_array_equal(
            drawn(result, name), [folded(0, name, step, "train") for step in range(9)]
        )


@pytest.mark.full
def test_fused_steps_and_single_steps_draw_the_same_keys():
    fused = trained("dropout", plugins=[Rng()], steps_per_execution=4)
    engine = fg.Engine(steps=9, seed=0, plugins=[Rng()])
    state = engine.init_state(witness("dropout"), BATCHES)
    for step, batch in enumerate(engine.iter_batches(BATCHES)):
        state, output = engine.step(state, batch)
        assert_array_equal(
            joined(output.metrics["dropout"].compute()), folded(0, "dropout", step, "train")
        )
        assert_array_equal(drawn(fused, "dropout")[step], folded(0, "dropout", step, "train"))


def test_keys_are_split_for_examples():
    streams = Rng().make_streams(0)
    context = fg.Context(streams, jnp.int32(3), training=True, rng_step=jnp.int32(3))
    expected = jax.random.split(
        jax.random.wrap_key_data(jnp.asarray(folded(0, "dropout", 3, "train"))), 5
    )
    assert_array_equal(
        jax.random.key_data(context.keys("dropout", 5)), jax.random.key_data(expected)
    )


@pytest.mark.full
def test_a_stream_that_is_not_per_step_draws_one_key():
    result = trained(
        "fixed", steps=3, plugins=[Rng(RngStream("fixed", train=True, per_step=False))]
    )
    assert_array_equal(drawn(result, "fixed"), [folded(0, "fixed", "train")] * 3)


@pytest.mark.full
def test_modules_are_initialized_from_the_stream_params():
    for plugins in ([], [Rng()]):
        result = fg.Engine(steps=1, seed=5, autoload=False, plugins=plugins).fit(witness(), BATCHES)
        assert_array_equal(result.module.made_from, folded(5, "params", "init"))
    assert_array_equal(
        bits(Rng().make_streams(5).init_keys()["params"]), folded(5, "params", "init")
    )


@pytest.mark.full
def test_keys_are_the_same_in_every_process():
    program = (
        "import jax; from fulgurite_rng import Rng;"
        "print(*jax.random.key_data(Rng().make_streams(0).train_keys(7)['dropout']))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [int(word) for word in run.stdout.split()] == folded(0, "dropout", 7, "train").tolist()


# --- evaluation -----------------------------------------------------------------------------------


class Evaluations:
    """Runs the evaluation `repeating` and `fresh` every two steps."""

    @fg.hookimpl
    def register_evaluations(self) -> list[fg.Evaluation]:
        return [
            fg.Evaluation("repeating", BATCHES),
            fg.Evaluation("fresh", BATCHES, new_rng_each_time=True),
        ]

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        def evaluate(run: fg.Run) -> None:
            run.evaluate("repeating")
            run.evaluate("fresh")

        return [fg.ScheduledAction("evaluate", 2, evaluate, stage="evaluate")]


@pytest.mark.full
def test_evaluation_keys_fold_evaluator_and_batch_and_the_step_only_if_new_each_time():
    history = trained("noise", steps=4, plugins=[Rng(NOISE), Evaluations()]).history
    for evaluation, step in enumerate((2, 4)):
        repeating = [folded(0, "noise", "eval", "repeating", index) for index in range(3)]
        fresh = [folded(0, "noise", step, "eval", "fresh", index) for index in range(3)]
        assert_array_equal(history["repeating/noise"][evaluation], repeating)
        assert_array_equal(history["fresh/noise"][evaluation], fresh)


def test_evaluation_keys_outside_of_an_engine():
    streams = Rng(NOISE).make_streams(0)
    assert set(streams.eval_keys("test", 1)) == {"noise"}
    assert_array_equal(
        bits(streams.eval_keys("test", 1)["noise"]), folded(0, "noise", "eval", "test", 1)
    )
    assert_array_equal(
        bits(streams.eval_keys("test", 1, step=4)["noise"]),
        folded(0, "noise", 4, "eval", "test", 1),
    )
    traced = jax.jit(lambda index, step: streams.eval_keys("test", index, step))(1, 4)["noise"]
    assert_array_equal(bits(traced), folded(0, "noise", 4, "eval", "test", 1))


@pytest.mark.full
def test_engine_evaluate_draws_by_name_and_batch():
    engine = fg.Engine(steps=2, seed=0, plugins=[Rng(NOISE)])
    result = engine.fit(witness("noise"), BATCHES)
    for name in ("test", "other"):
        expected = [folded(0, "noise", "eval", name, index) for index in range(3)]
        assert_array_equal(engine.evaluate(result, BATCHES, name=name)["noise"], expected)


# --- streams by name ------------------------------------------------------------------------------


def test_default_streams():
    streams = Rng().make_streams(0)
    assert streams.init_keys().keys() == {"params"}
    assert streams.train_keys(0).keys() == {"default", "dropout"}
    assert streams.eval_keys("test", 0) == {}


def test_a_stream_is_added_or_overwritten_by_name_and_no_other_changes():
    before, after = (
        Rng().make_streams(0),
        Rng(NOISE, RngStream("dropout", train=True, eval=True, per_step=False)).make_streams(0),
    )
    assert after.train_keys(3).keys() == {"default", "dropout", "noise"}
    assert after.eval_keys("test", 0).keys() == {"dropout", "noise"}
    assert_array_equal(bits(after.train_keys(3)["default"]), bits(before.train_keys(3)["default"]))
    assert_array_equal(bits(after.init_keys()["params"]), bits(before.init_keys()["params"]))
    assert_array_equal(bits(after.train_keys(3)["dropout"]), folded(0, "dropout", "train"))
    assert_array_equal(bits(before.train_keys(3)["dropout"]), folded(0, "dropout", 3, "train"))


@pytest.mark.full
def test_the_default_stream_is_the_same_with_and_without_the_plugin():
    without = trained("default", steps=3, plugins=[], autoload=False)
    assert_array_equal(
        drawn(without, "default"), drawn(trained("default", steps=3, plugins=["rng"]), "default")
    )


def test_the_plugin_is_active_as_soon_as_it_is_installed():
    assert "rng" in fg.Engine(steps=1).plugins.plugins
    assert "rng" not in fg.Engine(steps=1, plugins=["-rng"]).plugins.plugins


@pytest.mark.full
def test_random_numbers_of_a_plugin_do_not_depend_on_other_plugins():
    alone = trained("dropout", steps=3, plugins=[Drawing(), Rng()])
    among_others = trained("dropout", steps=3, plugins=[Rng(NOISE), Evaluations(), Drawing()])
    assert_array_equal(
        alone.state.plugin_states["drawing"], among_others.state.plugin_states["drawing"]
    )
    assert_array_equal(drawn(alone, "drawing/dropout"), drawn(among_others, "drawing/dropout"))
    assert (drawn(alone, "drawing/dropout") != drawn(alone, "dropout")).any(axis=1).all()


def test_unknown_stream_without_the_plugin_is_an_error_saying_what_to_install():
    with pytest.raises(PluginError, match=r"'dropout'.*default.*Stream\('dropout'\)"):
        trained("dropout", plugins=[], autoload=False)


def test_misspelt_stream_is_an_error_naming_the_nearest():
    with pytest.raises(PluginError, match=r"'droput'.*Did you mean 'dropout'\?"):
        trained("droput", plugins=[Rng()])


def test_evaluation_stream_in_training_is_an_error():
    with pytest.raises(PluginError, match=r"'noise' is not for training.*train=True"):
        trained("noise", plugins=[Rng(RngStream("noise", train=False, eval=True))])


def test_two_plugins_with_the_same_stream_are_an_error_naming_both():
    with pytest.raises(
        PluginError, match="RngStream 'drawing' comes from both 'rng' and 'drawing'"
    ):
        fg.Engine(steps=1, plugins=[Rng(RngStream("drawing", train=True)), Drawing()])


def test_invalid_stream_is_an_error():
    with pytest.raises(ConfigurationError, match="two streams called 'noise'"):
        Rng(NOISE, RngStream("noise", train=True))
    with pytest.raises(TypeError):
        RngStream()  # type: ignore[call-arg]


class WithDropout(fg.Module):
    """Drops elements of the batch."""

    weight: jax.Array
    dropout: Dropout

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        dropped = jax.vmap(self.dropout, axis_name="batch")(batch)
        return fg.Output(jnp.sum(self.weight**2), aux=dropped)

    def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
        return jax.vmap(self.dropout, axis_name="batch")(batch)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


@pytest.mark.full
def test_dropout_layer_draws_a_key_for_each_example_and_rests_in_evaluation_K29():
    batch = np.ones((3, 8), np.float32)
    engine = fg.Engine(seed=1, plugins=[Rng()], autoload=False)
    module = WithDropout(jnp.ones(2), Dropout(0.25, axis_name="batch"))
    state = engine.init_state(module, [batch])
    assert np.array_equal(engine.predict(module, [batch]), batch)
    _, out = engine.step(state, batch, returns=("aux",))
    key = fold_name(Rng().make_streams(1).train_keys(0)["dropout"], "make_rng", 0)
    by_hand = [
        eqx.nn.Dropout(0.25)(jnp.asarray(example), key=jax.random.fold_in(key, index))
        for index, example in enumerate(batch)
    ]
    assert np.array_equal(out.aux, np.stack(by_hand))
    assert 0 < np.mean(out.aux == 0) < 1


@pytest.mark.full
def test_seeds_that_differ_above_32_bits_are_different_seeds():
    streams = Rng().make_streams
    for seed in (0, 5, 2**31, 2**32 - 1):
        expected = jax.random.key_data(jax.random.key(seed))
        assert jax.random.key_data(streams(seed).root).tolist() == expected.tolist()
    # The two words of threefry are those of the seed; with x64 JAX says the same.
    for seed in (2**32, 2**32 + 5, 2**40 + 1, 2**63 - 1):
        words = [seed >> 32, seed % 2**32]
        engine = fg.Engine(steps=1, seed=seed, autoload=False)
        keys = [streams(seed).root, engine.init_state(witness(), BATCHES).key]
        keys.append(jax.jit(lambda seed=seed: streams(seed).root)())
        with jax.enable_x64(True):
            keys.append(jax.random.key(seed))
        assert [jax.random.key_data(key).tolist() for key in keys] == [words] * 4


def _draw_uniform_by_hand(key: Any, shape: tuple[int, ...], *num: int) -> Any:
    """Numbers for each index of the mapped axes: the key is split along the innermost one first."""
    if not num:
        return np.asarray(jax.random.uniform(key, shape))
    *outer, innermost = num
    keys = jax.random.split(key, innermost)
    parts = [_draw_uniform_by_hand(each, shape, *outer) for each in keys]
    return np.stack(parts, axis=len(outer))


@pytest.mark.variants("full")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_dropout_under_vmap_drops_other_elements_of_each_example(dtype: str):
    key = fold_name(Rng().make_streams(3).key("dropout", "train"), "make_rng", 0)
    dropout = Dropout(0.25)
    for shape, num_mapped in (((5,), 0), ((3, 5), 1), ((2, 3, 5), 2)):
        x = jnp.arange(1, np.prod(shape) + 1, dtype=dtype).reshape(shape)
        mapped = dropout
        for _ in range(num_mapped):
            mapped = jax.vmap(mapped)
        with rng_context(3):
            value = mapped(x)
        numbers = _draw_uniform_by_hand(key, (5,), *shape[:num_mapped])
        expected = np.where(numbers < 0.75, np.asarray(x / 0.75), 0)
        assert value.dtype == dtype
        assert_array_equal(np.asarray(value), expected)
        if num_mapped:
            rows = numbers.reshape(-1, 5) < 0.75
            assert len({row.tobytes() for row in rows}) > 1

    def differentiate(x: Array) -> Array:
        with rng_context(3):
            return jax.grad(lambda x: jnp.sum(jax.vmap(dropout)(x).real), holomorphic=False)(x)

    x = jnp.ones((3, 5), dtype)
    numbers = _draw_uniform_by_hand(key, (5,), 3)
    expected = np.where(numbers < 0.75, np.asarray(jnp.ones((), dtype) / 0.75), 0)
    for function in (differentiate, jax.jit(differentiate)):
        np.testing.assert_allclose(function(x).astype("complex64"), expected.astype("complex64"))


class Stacked(fg.Module):
    """Applies layers one after another, which hand keys to each."""

    layers: eqx.nn.Sequential

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        preds = jax.vmap(self.layers)(batch)
        return fg.Output(jnp.mean(preds**2), preds=preds)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


@pytest.mark.full
def test_dropout_within_sequential_trains_and_the_context_gives_the_same_keys_outside_an_engine():
    batch: Any = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)
    linear: Any = eqx.nn.Linear(8, 8, key=jax.random.key(1))
    module = Stacked(eqx.nn.Sequential([Dropout(0.5), linear, Dropout(0.25)]))
    engine = fg.Engine(seed=1, plugins=[Rng()], autoload=False)
    state = engine.init_state(module, [batch])
    root = Rng().make_streams(1).train_keys(0)["dropout"]
    masks = [
        _draw_uniform_by_hand(fold_name(root, "make_rng", index), (8,), 3) < rate
        for index, rate in ((0, 0.5), (1, 0.75))
    ]
    hidden = np.where(masks[0], batch / 0.5, 0) @ np.asarray(linear.weight).T + linear.bias
    expected = np.where(masks[1], hidden / 0.75, 0)
    with fg.training_mode(True), rng_context(1, step=0):
        assert_allclose(jax.vmap(module.layers)(batch), expected, rtol=1e-6)
        # A key that is handed in changes nothing.
        with rng_context(1, step=0):
            call = lambda x, key: module.layers(x, key=key)  # noqa: E731
            keys = jax.random.split(jax.random.key(9), 3)
            assert_allclose(jax.vmap(call)(batch, keys), expected, rtol=1e-6)
    evaluated = batch @ np.asarray(linear.weight).T + linear.bias
    assert_allclose(engine.predict(module, [batch]), evaluated, rtol=1e-6)
    with fg.training_mode(False, module.layers) as layers:
        assert_allclose(jax.vmap(layers)(batch), evaluated, rtol=1e-6)
    _, out = engine.step(state, batch, returns=("preds",))
    assert_allclose(out.preds, expected, rtol=1e-6)


@pytest.mark.full
def test_keys_outside_an_engine_are_those_of_its_streams_steps_and_phases():
    noise = RngStream("noise", train=True)
    with rng_context(7, noise, step=4):
        drawn = [fg.make_rng(), fg.make_rng("noise"), fg.make_rng("noise")]
    names = [("default", 0), ("noise", 0), ("noise", 1)]
    for key, (name, index) in zip(drawn, names, strict=True):
        expected = jax.random.wrap_key_data(jnp.asarray(folded(7, name, 4, "train")))
        assert_array_equal(bits(key), bits(fold_name(expected, "make_rng", index)))
    with fg.training_mode(False), rng_context(jax.random.key(7)):
        expected = jax.random.wrap_key_data(jnp.asarray(folded(7, "dropout", "eval")))
        assert_array_equal(bits(fg.make_rng("dropout")), bits(fold_name(expected, "make_rng", 0)))

    @jax.jit
    def draw(key: Key[Array, ""]) -> Array:
        with rng_context(key):
            return jax.random.key_data(fg.make_rng())

    assert draw(jax.random.key(1)).tolist() != draw(jax.random.key(2)).tolist()
    with pytest.raises(ModelError, match="rng_context"):
        fg.make_rng()


@pytest.mark.usefixtures("unchecked")
def test_anything_but_a_seed_or_one_key_is_refused():
    keys = jax.random.split(jax.random.key(0), 2)
    for wrong in (-1, 2**63, True, 1.5, jax.random.PRNGKey(0), keys):
        context = rng_context(wrong)  # pyright: ignore[reportArgumentType]
        with (
            pytest.raises(ConfigurationError, match="(?s)rng_context.*neither a seed"),
            context,
        ):
            pass
        with pytest.raises(ConfigurationError, match="(?s)make_streams.*neither a seed"):
            Rng().make_streams(wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("unchecked")
def test_a_context_takes_integers_of_numpy_and_no_fraction_of_a_step():
    with rng_context(np.int64(3), step=np.int32(2)):
        drawn = bits(fg.make_rng("dropout"))
    with rng_context(3, step=2):
        assert_array_equal(bits(fg.make_rng("dropout")), drawn)
    for wrong in (1.7, -1, 2**31, True, jnp.float32(1)):
        context = rng_context(0, step=wrong)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ConfigurationError, match="rng_context: step is"), context:
            pass


def test_dropout_of_everything_has_gradients_of_zero_and_rates_are_probabilities():
    def total(x: Array) -> Array:
        return jnp.sum(Dropout(1.0)(x))

    with rng_context(0):
        assert_array_equal(jax.grad(total)(jnp.ones(4)), np.zeros(4))
    for rate in (-0.1, 1.5, float("nan")):
        with pytest.raises(ConfigurationError, match="Dropout: p is .* from 0 to 1"):
            Dropout(rate)


def test_rate_of_dropout_may_be_an_array_that_is_traced():
    def drop(rate: Array, x: Array) -> Array:
        with rng_context(jax.random.key(0)):
            return Dropout(rate)(x)

    x = jnp.arange(1.0, 9.0)
    traced, known = jax.jit(drop)(jnp.float32(0.25), x), drop(jnp.float32(0.25), x)
    assert_allclose(traced, known, rtol=1e-6)
    is_kept = np.asarray(traced) != 0
    assert 0 < is_kept.sum() < 8
    assert_allclose(traced, np.where(is_kept, x / 0.75, 0), rtol=1e-6)
